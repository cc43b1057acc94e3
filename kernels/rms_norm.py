"""RMSNorm with an optional residual addition, in one launch.

The order of rounding is that of transformers' Llama: the sum is rounded to the model's dtype, the
norm is taken in float32 of the rounded sum and rounded, and only then multiplied by the weight.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_runs, require

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
):
    """Program i: rows i * ROWS .. (i + 1) * ROWS."""
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
    _check(x, weight, delta)
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(out)
    config = config or default_config(num_rows, width)
    if num_rows:
        rms_norm_kernel[(triton.cdiv(num_rows, config.rows),)](
            x,
            x if delta is None else delta,
            weight,
            out,
            total,
            num_rows,
            x.stride(0),
            x.stride(0) if delta is None else delta.stride(0),
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ROWS=config.rows,
            HAS_DELTA=delta is not None,
            num_warps=config.num_warps,
        )
    return out, total


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
