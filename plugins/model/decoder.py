"""The parameterised decoder: Llama, Mistral, Qwen2, Qwen3, SmolLM and their kin, over packed
tokens.

Operations follow transformers' order and rounding (RMSNorm: normalise in float32, cast, multiply;
rotary tables in float32, then cast), so that float32 results agree with it to the last bits. N
packed tokens, H hidden, D head_dim, V vocabulary.

A part of a cut model (plugins/model/cut.py) has the shape of a smaller one; once it has joined the
other ranks, it adds what they computed after o and down, and rank 0 gathers all logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from plugins.model.cut import WHOLE, Cut
from plugins.model.facts import ModelFacts
from plugins.model.ops import LayerOps, TorchOps
from plugins.model.rope import Rotary
from plugins.model.spec import DecoderSpec
from plugins.model.weights import LayerWeights, Weights
from plugins.shared.model_protocols import Attend, ModelShards, RankGroup

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with what the loop would otherwise look up at every step."""

    index: int
    weights: LayerWeights
    rope: bool
    window: int | None


class Decoder:
    """A model_protocols.Model. Inference only: the caller holds torch.inference_mode."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        facts: ModelFacts,
        ops: LayerOps | None = None,
        cut: Cut = WHOLE,
        shards: ModelShards | None = None,
        draw: Callable[[int], None] | None = None,
    ) -> None:
        """spec: of the whole model. weights are complete, a cut's for its part.
        facts.vocab_size leaves out head rows that no token id uses; a window
        that no sequence of facts.max_model_len tokens can exceed is dropped. ops: None = torch;
        where these are batch_invariant, a token's logits are. shards: the parts of a cut model.
        draw: fills random weights by a seed, None = these come from a file."""
        head_from, self._head_rows = cut.rank * cut.head_rows(spec), cut.head_rows(spec)
        self.spec = spec = cut.local(spec)
        self.shards = shards
        self.weights = weights
        self._draw = draw
        self.facts = facts
        self.name = facts.name
        self.num_layers = spec.num_layers
        self.num_q_heads = spec.num_q_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.vocab_size = facts.vocab_size
        self.max_model_len = facts.max_model_len
        self.end_token_ids = facts.end_token_ids
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._head = weights.head[: max(facts.vocab_size - head_from, 0)]
        self._rotary = Rotary(spec.rope, self.dtype, self.device)
        self._ops: LayerOps = ops or TorchOps()
        self.batch_invariant = self._ops.batch_invariant
        self._group: RankGroup | None = None
        self._summed = self._scored = self._ops.linear
        self._scale = spec.head_dim**-0.5
        self.layer_parameters = max(
            sum(matrix.numel() for matrix in layer.matrices) for layer in weights.layers
        )
        self._layers = [
            _Layer(index, layer, spec.rope_layers[index], _binding(spec.windows[index], facts))
            for index, layer in enumerate(weights.layers)
        ]

    def join(self, group: RankGroup) -> None:
        """Compute together with the other parts from now on."""
        self._group = group
        self._summed, self._scored = self._linear_summed, self._linear_gathered

    @torch.inference_mode()
    def reseed(self, seed: int) -> None:
        """Be the model that a run of that seed gets: random weights are drawn anew, where they
        are."""
        if self._draw is not None:
            self._draw(seed)

    @cached_property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer, loaded on first use."""
        return self.facts.load_tokenizer()

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor
    ) -> Tensor:
        """token_ids, positions int64 [N]; logits_rows int64 [k]. Returns logits [k, V].

        attend is called once a layer, in order, with q [N, Hq, D] and k, v [N, Hkv, D]: views with
        a contiguous last dimension, whose rows may be strided. A block's output is added to the
        hidden state by the norm that follows it.
        """
        hidden, rotation = self.embed(token_ids, positions)
        delta: Tensor | None = None
        for index in range(len(self._layers)):
            hidden, q, k, v = self.enter(index, hidden, delta, rotation, attend)
            hidden, delta = self.leave(index, hidden, self.attend(attend, index, q, k, v))
        return self.score(hidden, delta, logits_rows)

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Hidden states [N, H] and rotary tables."""
        return F.embedding(token_ids, self.weights.embedding), self._rotation(positions)

    def enter(
        self, index: int, hidden: Tensor, delta: Tensor | None, rotation: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer up to its attention, K and V stored where `attend` says: hidden states, and q, k
        and v as `attend` takes them. delta: the block before's output."""
        layer, eps = self._layers[index], self.spec.norm_eps
        weights = layer.weights
        normed, hidden = self._ops.add_norm(hidden, delta, weights.input_norm, eps)
        qkv = self._ops.linear(normed, weights.qkv, weights.qkv_bias)
        qkv = qkv.view(len(hidden), -1, self.head_dim)
        turn = rotation if layer.rope else None
        norms = weights.qk_norm, eps
        q, k, v = self._ops.rotate_store(qkv, turn, *norms, self.num_q_heads, attend, index)
        return hidden, q, k, v

    def attend(self, attend: Attend, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A layer's attention."""
        out: Tensor = attend(index, q, k, v, self._scale, self._layers[index].window)
        return out

    def leave(self, index: int, hidden: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """A layer after its attention [N, Hq, D]: hidden states, and the block's output."""
        weights = self._layers[index].weights
        delta = self._summed(out.reshape(len(hidden), -1), weights.o, weights.o_bias)
        eps = self.spec.norm_eps
        normed, hidden = self._ops.add_norm(hidden, delta, weights.post_norm, eps)
        return hidden, self._mlp(weights, normed)

    def score(self, hidden: Tensor, delta: Tensor | None, logits_rows: Tensor) -> Tensor:
        """Logits [k, V] of packed tokens logits_rows int64 [k]; on a rank that joined others and is
        not the first, of its own rows of the head."""
        delta = None if delta is None else delta[logits_rows]
        norm, eps = self.weights.final_norm, self.spec.norm_eps
        normed, _ = self._ops.add_norm(hidden[logits_rows], delta, norm, eps)
        return self._scored(normed, self._head, None)

    def describe(self, kv_dtype: torch.dtype) -> dict[str, Any]:
        """Which operations serve the layers, for the manifest."""
        counts = self.num_q_heads, self.num_kv_heads, self.head_dim
        return {"ops": self._ops.describe(self.device, counts, kv_dtype)}

    def multiply_once(self, token_counts: list[int], row_counts: list[int]) -> None:
        """Every matrix product of the layers for these numbers of tokens, and the head's for these
        numbers of rows."""
        layers = self.weights.layers
        shaped = {weight.shape: weight for layer in layers for weight in layer.matrices}
        for weights, counts in ((shaped.values(), token_counts), ((self._head,), row_counts)):
            for weight in weights:
                x = weight.new_zeros(max(counts), weight.shape[1])
                for count in counts:
                    self._ops.linear(x[:count], weight, None)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not (self.batch_invariant and self.device.type == "cpu"):
            return self._rotary(positions)
        # torch's vectors and the scalars left over at their end differ in a function's last bit.
        rows = [self._rotary(position) for position in torch.split(positions, 1)]
        cos, sin = (torch.cat(tables) for tables in zip(*rows, strict=True))
        return cos, sin

    def _mlp(self, weights: LayerWeights, normed: Tensor) -> Tensor:
        gate_up = self._ops.linear(normed, weights.gate_up, weights.gate_up_bias)
        gated = self._ops.gate(gate_up, self.spec.activation)
        return self._summed(gated, weights.down, weights.down_bias)

    def _linear_summed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert self._group is not None, "set by join"
        total: Tensor = self._group.sum(self._ops.linear(x, weight, bias))
        return total

    def _linear_gathered(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits [k, ranks * rows each], of which the vocabulary's come first."""
        assert self._group is not None, "set by join"
        own = self._ops.linear(x, weight, bias)
        if own.shape[1] < self._head_rows:
            own = F.pad(own, (0, self._head_rows - own.shape[1]))
        parts: Tensor = self._group.gather(own)
        if self._group.rank:
            return own
        return parts.transpose(0, 1).reshape(len(own), len(parts) * own.shape[1])


def _binding(window: int | None, facts: ModelFacts) -> int | None:
    return None if window is None or window >= facts.max_model_len else window
