"""RMSNorm with an optional residual addition, in one launch.

The order of rounding is that of transformers' Llama: the sum is rounded to the model's dtype, the
norm is taken in float32 of the rounded sum and rounded, and only then multiplied by the weight.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_runs, require
from kernels.jit import await_inputs
from kernels.launch import Launcher, form_of

MAX_WIDTH = 16_384


@dataclass(frozen=True, slots=True)
class RmsNormConfig:
    """rows: that one program normalises in turn, with the weight in registers. num_warps: of a
    program."""

    rows: int
    num_warps: int


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    p_x,
    p_delta,
    p_weight,
    p_out,
    p_sum,
    num_rows,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: rows i * ROWS .. (i + 1) * ROWS."""
    await_inputs(EARLY)
    i_column = tl.arange(0, BLOCK)
    inside = i_column < WIDTH
    b_weight = tl.load(p_weight + i_column, mask=inside, other=0.0, eviction_policy="evict_last")
    b_weight = b_weight.to(tl.float32)
    for i in tl.static_range(ROWS):
        row = (tl.program_id(0) * ROWS + i).to(tl.int64)
        valid = inside & (row < num_rows)
        b_x = tl.load(p_x + row * x_stride + i_column, mask=valid, other=0.0).to(tl.float32)
        if HAS_DELTA:
            o_delta = row * delta_stride + i_column
            b_delta = tl.load(p_delta + o_delta, mask=valid, other=0.0).to(tl.float32)
            b_sum = (b_x + b_delta).to(p_sum.dtype.element_ty)
            tl.store(p_sum + row * WIDTH + i_column, b_sum, mask=valid)
            b_x = b_sum.to(tl.float32)
        scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps)
        b_normed = (b_x * scale).to(p_out.dtype.element_ty).to(tl.float32)
        b_out = (b_normed * b_weight).to(p_out.dtype.element_ty)
        tl.store(p_out + row * WIDTH + i_column, b_out, mask=valid)


_run = Launcher(rms_norm_kernel)
_accepted: set[tuple[object, ...]] = set()
"""Forms of arguments that were checked: the same come again in every layer."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    config: RmsNormConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm(x + delta) * weight, and x + delta rounded to x's dtype (x itself without delta).

    x, delta [rows, width], width <= 16384, rows may be strided; weight [width]; one dtype of
    float32, float16, bfloat16. Raises ValueError for what it cannot take."""
    same_rows = delta is None or delta.shape[:1] == x.shape[:1]
    form = *form_of(x, weight, delta), weight.shape, same_rows
    if form not in _accepted:
        _check(x, weight, delta)
        _accepted.add(form)
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(out)
    config = config or default_config(num_rows, width)
    if num_rows:
        other = x if delta is None else delta
        _run(
            (form, config),
            (-(-num_rows // config.rows), 1),
            (x, other, weight, out, total, num_rows, x.stride(0), other.stride(0), float(eps)),
            lambda: {
                "WIDTH": width,
                "BLOCK": triton.next_power_of_2(width),
                "ROWS": config.rows,
                "HAS_DELTA": delta is not None,
            },
            num_warps=config.num_warps,
        )
    return out, total


@lru_cache
def default_config(num_rows: int, width: int) -> RmsNormConfig:
    """Few rows: many warps to a row, for its latency. Many rows: 32 elements to a thread, so that
    several programs share an SM."""
    elements = 16 if num_rows <= 512 else 32
    warps = triton.next_power_of_2(width) // (32 * elements)
    return RmsNormConfig(rows=1, num_warps=max(1, min(16, warps)))


def _check(x: Tensor, weight: Tensor, delta: Tensor | None) -> None:
    require(x.dim() == 2, "x", "[rows, width]", tuple(x.shape))
    width = x.shape[1]
    require(1 <= width <= MAX_WIDTH, "x width", f"between 1 and {MAX_WIDTH}", width)
    known = x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    require(known, "x dtype", "float32, float16 or bfloat16", x.dtype)
    require(x.stride(1) == 1, "x strides", "1 in the last dimension", x.stride())
    require(weight.shape == (width,), "weight", f"of shape ({width},)", tuple(weight.shape))
    for name, other in (("weight", weight), ("delta", delta)):
        if other is not None:
            require(other.dtype == x.dtype, f"{name} dtype", str(x.dtype), other.dtype)
            require(other.device == x.device, f"{name} device", str(x.device), str(other.device))
            rule = "1 in the last dimension"
            require(other.stride(-1) == 1, f"{name} strides", rule, other.stride())
    if delta is not None:
        require(delta.shape == x.shape, "delta", f"shaped as x {tuple(x.shape)}", delta.shape)
    check_runs(x)
