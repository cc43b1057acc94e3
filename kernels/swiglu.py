"""The gated activation of a feed-forward layer on the output of one fused GEMM: SwiGLU and its kin
(arXiv:2002.05202)."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_runs, require
from kernels.jit import LOG2E, await_inputs
from kernels.launch import Launcher, form_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, slots=True)
class SwigluConfig:
    """block: columns of a program. num_warps: of a program."""

    block: int = 2048
    num_warps: int = 4


@triton.jit
def swiglu_kernel(
    p_gate_up,
    p_out,
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, block of columns), flattened: columns fastest."""
    await_inputs(EARLY)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = i_column < WIDTH
    p_row = p_gate_up + row * row_stride + i_column
    b_gate = tl.load(p_row, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + WIDTH, mask=inside, other=0.0).to(tl.float32)
    b_active = _activation(b_gate, ACTIVATION).to(p_out.dtype.element_ty).to(tl.float32)
    b_out = (b_active * b_up).to(p_out.dtype.element_ty)
    tl.store(p_out + row * WIDTH + i_column, b_out, mask=inside)


@triton.jit
def _activation(b_x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        b_y = b_x / (1.0 + tl.exp(-b_x))
    elif ACTIVATION == "gelu":
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        b_inner = 0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x)
        # 1 + tanh(z) = 2 - 2 / (exp(2 z) + 1): saturates without a NaN at either end.
        b_y = b_x * (1.0 - 1.0 / (tl.exp2(b_inner * (2.0 * LOG2E)) + 1.0))
    else:
        b_y = tl.where(b_x < 0.0, 0.0, b_x)  # NaN stays NaN
    return b_y


_run = Launcher(swiglu_kernel)
_accepted: set[tuple[object, ...]] = set()
"""Forms of arguments that were checked: the same come again in every layer."""


def swiglu(gate_up: Tensor, activation: str = "silu", config: SwigluConfig | None = None) -> Tensor:
    """activation(gate) * up. gate_up [rows, 2 * width], gate first, float32, float16 or bfloat16,
    rows may be strided. The activation is computed in float32 and rounded before the product, as
    torch does. activation: silu, gelu, gelu_tanh or relu. Returns [rows, width]; raises ValueError
    for what it cannot take."""
    form = *form_of(gate_up), activation
    if form not in _accepted:
        _check(gate_up, activation)
        _accepted.add(form)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    config = config or default_config(num_rows, width)
    if num_rows:
        _run(
            (form, config),
            (num_rows * -(-width // config.block), 1),
            (gate_up, out, gate_up.stride(0)),
            lambda: {"WIDTH": width, "BLOCK": config.block, "ACTIVATION": activation},
            num_warps=config.num_warps,
        )
    return out


@lru_cache
def default_config(num_rows: int, width: int) -> SwigluConfig:
    """Few rows: small blocks, so that all SMs take part."""
    if num_rows <= 64:
        return SwigluConfig(block=min(512, triton.next_power_of_2(width)), num_warps=2)
    block = min(2048, triton.next_power_of_2(width))
    return SwigluConfig(block=block, num_warps=max(1, block // 512))


def _check(gate_up: Tensor, activation: str) -> None:
    require(activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", activation)
    require(gate_up.dim() == 2, "gate_up", "[rows, 2 * width]", tuple(gate_up.shape))
    columns = gate_up.shape[1]
    require(columns >= 2 and columns % 2 == 0, "gate_up columns", "even and positive", columns)
    require(gate_up.stride(1) == 1, "gate_up strides", "1 in the last dimension", gate_up.stride())
    known = gate_up.dtype in (torch.float32, torch.float16, torch.bfloat16)
    require(known, "gate_up dtype", "float32, float16 or bfloat16", gate_up.dtype)
    check_runs(gate_up)
