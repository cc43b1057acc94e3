"""The decoder's parameters as plain tensors, and where each tensor of a checkpoint goes.

Q, K and V share one matrix, and so do gate and up: a checkpoint's tensors are copied straight into
row ranges of the merged ones, so that nothing is ever held twice. `spec` is always the whole
model's; a cut (plugins/model/cut.py) leaves one rank's part of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.model.cut import WHOLE, Cut, Part
from plugins.model.spec import DecoderSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(slots=True)
class LayerWeights:
    """One layer. H hidden, I intermediate, D head_dim, of a cut its part; matrices are [out, in].

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
    """A decoder. embedding [V, H]; head [V, H], of a cut its rows, in the embedding's memory when
    tied; final_norm [H]."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: list[LayerWeights]


@dataclass(frozen=True, slots=True)
class Slot:
    """Destination of one checkpoint tensor: `shape` in the file, of which `part` (None = all) is
    broadcast into `view`."""

    view: Tensor
    shape: tuple[int, ...]
    part: Part | None = None


def allocate(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, cut: Cut = WHOLE
) -> Weights:
    """Uninitialised parameters; every one is covered by `slots` (the head too, unless tied)."""
    local = cut.local(spec)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def optional(wanted: bool, *shape: int) -> Tensor | None:
        return empty(*shape) if wanted else None

    hidden, inner, dim = local.hidden_size, local.intermediate_size, local.head_dim
    q_rows = local.num_q_heads * dim
    qkv_rows = q_rows + 2 * local.num_kv_heads * dim
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv_rows, hidden),
            o=empty(hidden, q_rows),
            post_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
            qk_norm=optional(spec.qk_norm, local.num_q_heads + local.num_kv_heads, dim),
            qkv_bias=optional(spec.qkv_bias, qkv_rows),
            o_bias=optional(spec.o_bias, hidden),
            gate_up_bias=optional(spec.mlp_bias, 2 * inner),
            down_bias=optional(spec.mlp_bias, hidden),
        )
        for _ in range(spec.num_layers)
    ]
    embedding = empty(spec.vocab_size, hidden)
    rows = cut.head(spec)
    if spec.tied:
        head = embedding if rows is None else rows.of(embedding)
    else:
        head = empty(spec.vocab_size if rows is None else rows.end - rows.begin, hidden)
    return Weights(embedding, head, empty(hidden), layers)


def slots(weights: Weights, spec: DecoderSpec, cut: Cut = WHOLE) -> dict[str, Slot]:
    """Checkpoint name -> destination, for every tensor that must be there."""
    table = {EMBEDDING: _whole(weights.embedding), "model.norm.weight": _whole(weights.final_norm)}
    if not spec.tied:
        table[HEAD] = Slot(weights.head, tuple(weights.embedding.shape), cut.head(spec))
    for index, layer in enumerate(weights.layers):
        for name, slot in _layer_slots(layer, spec, cut):
            table[f"model.layers.{index}.{name}"] = slot
    return table


def fill_random(weights: Weights, spec: DecoderSpec, seed: int, cut: Cut = WHOLE) -> None:
    """Seeded weights: matrices normal with the config's initializer_range, norms 1, biases 0. Parts
    of a cut are those of the whole model, whose every draw each rank makes."""
    generator = torch.Generator(weights.embedding.device).manual_seed(seed)
    for name, slot in slots(weights, spec, cut).items():
        if name.endswith("bias"):
            slot.view.zero_()
        elif slot.view.dim() == 1 or "_norm" in name:
            slot.view.fill_(1.0)
        elif slot.part is None:
            slot.view.normal_(0.0, spec.initializer_range, generator=generator)
        else:
            whole = slot.view.new_empty(slot.shape)
            whole.normal_(0.0, spec.initializer_range, generator=generator)
            slot.view.copy_(slot.part.of(whole))


def keep_biases_of_sums_once(weights: Weights, cut: Cut) -> None:
    """Ranks add up what o and down give: one of them brings the bias."""
    if cut.rank:
        for layer in weights.layers:
            layer.o_bias = layer.down_bias = None


def _layer_slots(layer: LayerWeights, spec: DecoderSpec, cut: Cut) -> Iterator[tuple[str, Slot]]:
    dim, inner, heads = spec.head_dim, spec.intermediate_size, cut.local(spec).num_q_heads
    q_rows, kv_rows = spec.num_q_heads * dim, spec.num_kv_heads * dim
    kv_part, inner_part = (kv_rows, cut.kv(spec)), (inner, cut.inner(spec))
    qkv_parts = {"q_proj": (q_rows, cut.q(spec)), "k_proj": kv_part, "v_proj": kv_part}
    mlp_parts = {"gate_proj": inner_part, "up_proj": inner_part}
    yield "input_layernorm.weight", _whole(layer.input_norm)
    yield "post_attention_layernorm.weight", _whole(layer.post_norm)
    yield from _rows("self_attn", "weight", layer.qkv, qkv_parts)
    yield from _rows("self_attn", "bias", layer.qkv_bias, qkv_parts)
    yield "self_attn.o_proj.weight", Slot(layer.o, (spec.hidden_size, q_rows), cut.q(spec, 1))
    yield from _rows("self_attn", "bias", layer.o_bias, {"o_proj": (spec.hidden_size, None)})
    yield from _rows("mlp", "weight", layer.gate_up, mlp_parts)
    yield from _rows("mlp", "bias", layer.gate_up_bias, mlp_parts)
    yield "mlp.down_proj.weight", Slot(layer.down, (spec.hidden_size, inner), cut.inner(spec, 1))
    yield from _rows("mlp", "bias", layer.down_bias, {"down_proj": (spec.hidden_size, None)})
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", Slot(layer.qk_norm[:heads], (dim,))
        yield "self_attn.k_norm.weight", Slot(layer.qk_norm[heads:], (dim,))


def _rows(
    block: str, kind: str, merged: Tensor | None, parts: dict[str, tuple[int, Part | None]]
) -> Iterator[tuple[str, Slot]]:
    """The consecutive row ranges of a merged parameter. parts: name -> rows in the file, and which
    of them."""
    if merged is None:
        return
    lengths = [rows if part is None else part.end - part.begin for rows, part in parts.values()]
    views = torch.split(merged, lengths)
    for (name, (rows, part)), view in zip(parts.items(), views, strict=True):
        yield f"{block}.{name}.{kind}", Slot(view, (rows, *view.shape[1:]), part)


def _whole(view: Tensor) -> Slot:
    return Slot(view, tuple(view.shape))
