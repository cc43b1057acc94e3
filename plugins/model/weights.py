"""The decoder's parameters as plain tensors, and where each tensor of a checkpoint goes.

Q, K and V share one matrix, and so do gate and up: a checkpoint's tensors are copied straight into
row ranges of the merged ones, so that nothing is ever held twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.model.spec import DecoderSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(slots=True)
class LayerWeights:
    """One layer. H hidden, I intermediate, D head_dim; matrices are [out, in].

    qkv [(Hq + 2 Hkv) * D, H]; o [H, Hq * D]; gate_up [2 I, H]; down [H, I]; norms [H].
    qk_norm [Hq + Hkv, D] repeats the two head norms for every head, so that one product serves
    both.
    """

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qk_norm: Tensor | None
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those of the layer's products."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(slots=True)
class Weights:
    """A whole decoder. embedding [V, H]; head [V, H], the same tensor when tied; final_norm [H]."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: list[LayerWeights]


@dataclass(frozen=True, slots=True)
class Slot:
    """Destination of one checkpoint tensor: `shape` in the file, broadcast into `view`."""

    view: Tensor
    shape: tuple[int, ...]


def allocate(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> Weights:
    """Uninitialised parameters; every one is covered by `slots` (the head too, unless tied)."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def optional(wanted: bool, *shape: int) -> Tensor | None:
        return empty(*shape) if wanted else None

    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_rows = spec.num_q_heads * dim
    qkv_rows = q_rows + 2 * spec.num_kv_heads * dim
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv_rows, hidden),
            o=empty(hidden, q_rows),
            post_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
            qk_norm=optional(spec.qk_norm, spec.num_q_heads + spec.num_kv_heads, dim),
            qkv_bias=optional(spec.qkv_bias, qkv_rows),
            o_bias=optional(spec.o_bias, hidden),
            gate_up_bias=optional(spec.mlp_bias, 2 * inner),
            down_bias=optional(spec.mlp_bias, hidden),
        )
        for _ in range(spec.num_layers)
    ]
    embedding = empty(spec.vocab_size, hidden)
    head = embedding if spec.tied else empty(spec.vocab_size, hidden)
    return Weights(embedding, head, empty(hidden), layers)


def slots(weights: Weights, spec: DecoderSpec) -> dict[str, Slot]:
    """Checkpoint name -> destination, for every tensor that must be there."""
    table = {EMBEDDING: _whole(weights.embedding), "model.norm.weight": _whole(weights.final_norm)}
    if not spec.tied:
        table[HEAD] = _whole(weights.head)
    for index, layer in enumerate(weights.layers):
        for name, slot in _layer_slots(layer, spec):
            table[f"model.layers.{index}.{name}"] = slot
    return table


def fill_random(weights: Weights, spec: DecoderSpec, seed: int) -> None:
    """Seeded weights: matrices normal with the config's initializer_range, norms 1, biases 0."""
    generator = torch.Generator(weights.embedding.device).manual_seed(seed)
    for name, slot in slots(weights, spec).items():
        if name.endswith("bias"):
            slot.view.zero_()
        elif slot.view.dim() == 1 or "_norm" in name:
            slot.view.fill_(1.0)
        else:
            slot.view.normal_(0.0, spec.initializer_range, generator=generator)


def _layer_slots(layer: LayerWeights, spec: DecoderSpec) -> Iterator[tuple[str, Slot]]:
    dim, heads, kv_heads = spec.head_dim, spec.num_q_heads, spec.num_kv_heads
    qkv_parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    mlp_parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
    yield "input_layernorm.weight", _whole(layer.input_norm)
    yield "post_attention_layernorm.weight", _whole(layer.post_norm)
    yield from _rows("self_attn", "weight", layer.qkv, qkv_parts)
    yield from _rows("self_attn", "bias", layer.qkv_bias, qkv_parts)
    yield from _rows("self_attn", "weight", layer.o, {"o_proj": spec.hidden_size})
    yield from _rows("self_attn", "bias", layer.o_bias, {"o_proj": spec.hidden_size})
    yield from _rows("mlp", "weight", layer.gate_up, mlp_parts)
    yield from _rows("mlp", "bias", layer.gate_up_bias, mlp_parts)
    yield from _rows("mlp", "weight", layer.down, {"down_proj": spec.hidden_size})
    yield from _rows("mlp", "bias", layer.down_bias, {"down_proj": spec.hidden_size})
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", Slot(layer.qk_norm[:heads], (dim,))
        yield "self_attn.k_norm.weight", Slot(layer.qk_norm[heads:], (dim,))


def _rows(
    block: str, kind: str, merged: Tensor | None, parts: dict[str, int]
) -> Iterator[tuple[str, Slot]]:
    """The consecutive row ranges of a merged parameter."""
    if merged is None:
        return
    for name, view in zip(parts, torch.split(merged, list(parts.values())), strict=True):
        yield f"{block}.{name}.{kind}", _whole(view)


def _whole(view: Tensor) -> Slot:
    return Slot(view, tuple(view.shape))
