"""A matrix product in which a row's result has the same bits whatever rows stand beside it.

A library chooses another kernel for another number of rows, and with it another order of sums. Here
an element is one chain of accumulations over K from 0 on, in float32, of the steps that the matrix
instruction takes; there is no split over K. The tile's size decides only who computes the element,
so it may follow the number of rows; tests on the card compare all of them bit for bit. For that the
instruction must be the same: tiles of half types have 64 or 128 rows and whole warp groups, which
Hopper's takes. Tiles are visited in groups of rows, so that the weight's part is read from the
cache again.

Source of the ordering: Triton's tutorial on matrix multiplication."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_device, check_runs, require
from kernels.jit import dot, upcast
from kernels.launch import Launcher, form_of, num_sms

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUP_ROWS = 8
"""Tiles of rows that share a column of tiles while it is in the cache."""


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Launch parameters: rows, columns and depth of a tile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


CONFIGS = (
    MatmulConfig(128, 256, 64, num_warps=8, num_stages=3),
    MatmulConfig(128, 128, 64, num_warps=8, num_stages=4),
    MatmulConfig(64, 128, 64, num_warps=4, num_stages=4),
    MatmulConfig(64, 64, 128, num_warps=4, num_stages=3),
    MatmulConfig(64, 32, 128, num_warps=4, num_stages=4),
    MatmulConfig(64, 16, 128, num_warps=4, num_stages=5),
)
"""Of half types, the largest first."""

FLOAT32 = MatmulConfig(32, 32, 32, num_warps=4, num_stages=3)
"""One for all: its products are no matrix instructions, and their order follows the layout."""


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    p_x, p_weight, p_bias, p_out, num_rows, columns, depth, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """EVEN: depth is a multiple of BLOCK_K."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    i_m = first + tl.program_id(0) % (GROUP * tiles_n) % height
    i_n = tl.program_id(0) % (GROUP * tiles_n) // height
    i_row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    i_column = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    i_k = tl.arange(0, BLOCK_K)
    # Rows and columns past the end repeat the last one: loads need no mask.
    b_row = tl.minimum(i_row, num_rows - 1).to(tl.int64)
    b_column = tl.minimum(i_column, columns - 1).to(tl.int64)
    p_a = p_x + b_row[:, None] * x_stride + i_k[None, :]
    p_b = p_weight + b_column[:, None] * weight_stride + i_k[None, :]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN:
            b_a = tl.load(p_a + k)
            b_b = tl.load(p_b + k)
        else:
            inside = (k + i_k < depth)[None, :]
            b_a = tl.load(p_a + k, mask=inside, other=0.0)
            b_b = tl.load(p_b + k, mask=inside, other=0.0)
        b_acc = dot(b_a, tl.trans(b_b), b_acc, UPCAST)
    if p_bias is not None:
        b_acc += tl.load(p_bias + b_column).to(tl.float32)[None, :]
    p_tile = p_out + i_row.to(tl.int64)[:, None] * columns + i_column[None, :]
    mask = (i_row < num_rows)[:, None] & (i_column < columns)[None, :]
    tl.store(p_tile, b_acc.to(p_out.dtype.element_ty), mask=mask)


_run = Launcher(matmul_kernel)
_accepted: set[tuple[object, ...]] = set()
"""Forms of arguments that were checked: the same come again in every layer."""


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: MatmulConfig | None = None
) -> Tensor:
    """x @ weight^T + bias, accumulated in float32 and rounded once, the bits of a row independent
    of the others.

    x [M, K], rows may be strided; weight [N, K], K contiguous; bias [N]; one dtype of float32 (not
    rounded to TF32), float16, bfloat16. config: launch parameters, None = by M, N and the device.
    Returns [M, N]. Raises ValueError for what it cannot take."""
    form = *form_of(x, weight, bias), weight.shape, None if bias is None else bias.shape
    if form not in _accepted:
        _check(x, weight, bias)
        _accepted.add(form)
    (num_rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((num_rows, columns), dtype=x.dtype, device=x.device)
    if config is None:
        config = default_config(x.dtype, num_rows, columns, num_sms(x.device, on_cpu=132))
    if num_rows:
        tiles = -(-num_rows // config.block_m) * -(-columns // config.block_n)
        _run(
            (form, config),
            (tiles, 1),
            (x, weight, bias, out, num_rows, columns, depth, x.stride(0), weight.stride(0)),
            lambda: {
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "GROUP": GROUP_ROWS,
                "EVEN": depth % config.block_k == 0,
                "UPCAST": upcast(x.dtype),
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


@lru_cache(maxsize=4096)
def default_config(dtype: torch.dtype, num_rows: int, columns: int, sms: int) -> MatmulConfig:
    """The largest tile of which there is about one for each multiprocessor, of 64 rows where there
    are no more."""
    if dtype == torch.float32:
        return FLOAT32
    fitting = [one for one in CONFIGS if one.block_m == 64 or num_rows > 64]
    for one in fitting:
        tiles = -(-num_rows // one.block_m) * -(-columns // one.block_n)
        if 10 * tiles >= 9 * sms:
            return one
    return fitting[-1]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require(x.dim() == 2, "x", "[rows, depth]", tuple(x.shape))
    require(weight.dim() == 2, "weight", "[columns, depth]", tuple(weight.shape))
    require(x.dtype in DTYPES, "x dtype", "float32, float16 or bfloat16", x.dtype)
    depth = x.shape[1]
    require(depth >= 1, "x depth", ">= 1", depth)
    require(weight.shape[1] == depth, "weight depth", f"x's {depth}", weight.shape[1])
    require(weight.shape[0] >= 1, "weight columns", ">= 1", weight.shape[0])
    for name, tensor in (("x", x), ("weight", weight)):
        rule = "1 in the last dimension"
        require(tensor.stride(1) == 1 or depth == 1, f"{name} strides", rule, tensor.stride())
    if bias is not None:
        require(bias.shape == weight.shape[:1], "bias", f"[{len(weight)}]", tuple(bias.shape))
        require(bias.stride(0) == 1 or len(bias) == 1, "bias strides", "1", bias.stride())
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            require(other.dtype == x.dtype, f"{name} dtype", str(x.dtype), other.dtype)
            check_device(name, other, x)
    check_runs(x)
