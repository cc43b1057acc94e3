"""The parameterised decoder: Llama, Mistral, Qwen2, Qwen3, SmolLM and their kin, over packed
tokens.

Operations follow transformers' order and rounding (RMSNorm: normalise in float32, cast, multiply;
rotary tables in float32, then cast), so that float32 results agree with it to the last bits. N
packed tokens, H hidden, D head_dim, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from core.protocols import Attend
from plugins.model.facts import ModelFacts
from plugins.model.rope import Rotary, rotate
from plugins.model.spec import DecoderSpec
from plugins.model.weights import LayerWeights, Weights

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with what the loop would otherwise look up at every step."""

    index: int
    weights: LayerWeights
    rope: bool
    window: int | None


class Decoder:
    """A core.protocols.Model. Inference only: the caller holds torch.inference_mode."""

    def __init__(self, spec: DecoderSpec, weights: Weights, facts: ModelFacts) -> None:
        """weights are complete. facts.vocab_size cuts head rows that no token id uses; a window
        that no sequence of facts.max_model_len tokens can exceed is dropped."""
        self.spec = spec
        self.weights = weights
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
        self._head = weights.head[: facts.vocab_size]
        self._rotary = Rotary(spec.rope, self.dtype, self.device)
        self._activation = _ACTIVATIONS[spec.activation]
        self._scale = spec.head_dim**-0.5
        self._layers = [
            _Layer(index, layer, spec.rope_layers[index], _binding(spec.windows[index], facts))
            for index, layer in enumerate(weights.layers)
        ]

    @cached_property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer, loaded on first use."""
        return self.facts.load_tokenizer()

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor
    ) -> Tensor:
        """token_ids, positions int64 [N]; logits_rows int64 [k]. Returns logits float32 [k, V].

        attend is called once a layer, in order, with q [N, Hq, D] and k, v [N, Hkv, D]: views with
        a contiguous last dimension, whose rows may be strided.
        """
        hidden = F.embedding(token_ids, self.weights.embedding)
        cos, sin = self._rotary(positions)
        for layer in self._layers:
            hidden = hidden + self._attention(layer, hidden, cos, sin, attend)
            hidden = hidden + self._mlp(layer.weights, hidden)
        hidden = self._norm(hidden[logits_rows], self.weights.final_norm)
        return F.linear(hidden, self._head).float()

    def _attention(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        weights = layer.weights
        num_tokens = hidden.shape[0]
        qkv = F.linear(self._norm(hidden, weights.input_norm), weights.qkv, weights.qkv_bias)
        qkv = qkv.view(num_tokens, -1, self.head_dim)
        num_q, num_qk = self.num_q_heads, self.num_q_heads + self.num_kv_heads
        qk, v = qkv[:, :num_qk], qkv[:, num_qk:]
        if weights.qk_norm is not None:
            qk = self._norm(qk, weights.qk_norm)
        if layer.rope:
            qk = rotate(qk, cos, sin)
        out = attend(layer.index, qk[:, :num_q], qk[:, num_q:], v, self._scale, layer.window)
        return F.linear(out.reshape(num_tokens, -1), weights.o, weights.o_bias)

    def _mlp(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, weights.post_norm)
        gate, up = F.linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, -1)
        return F.linear(self._activation(gate) * up, weights.down, weights.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # The weight is applied after the cast back to x's dtype, as transformers does; F.rms_norm
        # with a weight would round once less in half precision.
        return F.rms_norm(x, x.shape[-1:], None, self.spec.norm_eps) * weight


def _binding(window: int | None, facts: ModelFacts) -> int | None:
    return None if window is None or window >= facts.max_model_len else window
