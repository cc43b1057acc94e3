"""Merges what several programs made of one tile of queries: normalised partial results and their
log-sum-exp (FlashDecoding)."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import LN2
from kernels.launch import Launcher

MAX_SPLITS = 8
"""Of a tile, unless a configuration names more."""


@triton.jit(do_not_specialize=["num_pairs", "num_splits"])
def _merge_kernel(
    p_partial, p_partial_lse, p_out, p_lse, num_pairs, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Merge num_splits partial results of (token, head) pairs, in base 2. The loops are over MOST,
    so that all loads are under way at once, whatever their number."""
    i_pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    i_d = tl.arange(0, BLOCK_D)
    valid = i_pair < num_pairs
    mask = valid[:, None] & (i_d[None, :] < HEAD_DIM)
    b_max = tl.full([BLOCK_P], float("-inf"), tl.float32)
    for split in tl.static_range(MOST):
        o_pair = i_pair + split * num_pairs.to(tl.int64)
        there = valid & (split < num_splits)
        b_lse = tl.load(p_partial_lse + o_pair, mask=there, other=float("-inf"))
        b_max = tl.maximum(b_max, b_lse)
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.zeros([BLOCK_P], tl.float32)
    b_acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for split in tl.static_range(MOST):
        o_pair = i_pair + split * num_pairs.to(tl.int64)
        there = valid & (split < num_splits)
        b_lse = tl.load(p_partial_lse + o_pair, mask=there, other=float("-inf"))
        b_weight = tl.exp2(b_lse - b_shift)
        o_part = o_pair[:, None] * HEAD_DIM + i_d[None, :]
        b_part = tl.load(p_partial + o_part, mask=mask & (split < num_splits), other=0.0)
        b_acc += b_part * b_weight[:, None]
        b_sum += b_weight
    b_total = tl.where(b_sum > 0.0, b_sum, 1.0)
    b_out = b_acc / b_total[:, None]
    o_out = i_pair[:, None] * HEAD_DIM + i_d[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=mask)
    if p_lse is not None:
        tl.store(p_lse + i_pair, (b_max + tl.log2(b_total)) * LN2, mask=valid)


_run_merge = Launcher(_merge_kernel)


def merge_splits(
    key: tuple[Any, ...], part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None
) -> None:
    """Merge part [S, T, Hq, D] and part_lse [S, T, Hq], in base 2, into out and, if wanted, lse, a
    natural logarithm. key: of all that compilation depends on, as for Launcher."""
    splits, num_tokens, heads, head_dim = part.shape
    pairs, block = num_tokens * heads, 16
    # Triton's own next_power_of_2 and cdiv cost the host several microseconds a call.
    block_d = 1 << (head_dim - 1).bit_length()
    most = max(MAX_SPLITS, splits)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_P": block, "MOST": most}
    arguments = part, part_lse, out, lse, pairs, splits
    _run_merge((key, most), (-(-pairs // block), 1), arguments, lambda: sizes, num_warps=4)
