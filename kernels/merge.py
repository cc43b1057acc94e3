"""Merges partial attention results by their log-sum-exp.

A partial result is an output normalised over the keys that its program saw, float32, and the base-2
log-sum-exp of their scores; -inf means that it saw none, and it weighs nothing. The sum runs in the
order of parts, so that the same parts give the same bits."""

import triton
import triton.language as tl

from kernels.jit import LN2

BLOCK_PARTS = tl.constexpr(64)
"""Partial results that a program holds at once."""


@triton.jit
def merge_kernel(
    p_out, p_lse, p_partial_out, p_partial_lse, p_merges, p_num_merges,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LSE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One query head, rows in turn. Grid (programs, heads); merges int32 [num_merges, 3]: row, its
    first partial result, their number; partials [parts, heads, HEAD_DIM] and [parts, heads]."""
    merge = tl.program_id(0)
    head = tl.program_id(1)
    # The planner wrote these at least two launches ago: they need not wait for the partials.
    num_merges = tl.load(p_num_merges)
    row = tl.load(p_merges + merge * 3)
    first = tl.load(p_merges + merge * 3 + 1)
    num_parts = tl.load(p_merges + merge * 3 + 2)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    i_s = tl.arange(0, BLOCK_PARTS)
    i_d = tl.arange(0, BLOCK_D)
    while merge < num_merges:
        b_max = float("-inf")
        b_sum = 0.0
        b_acc = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, num_parts, BLOCK_PARTS):
            valid = start + i_s < num_parts
            o_part = (first + start + i_s).to(tl.int64) * NUM_HEADS + head
            b_lse = tl.load(p_partial_lse + o_part, mask=valid, other=float("-inf"))
            b_out = tl.load(
                p_partial_out + o_part[:, None] * HEAD_DIM + i_d[None, :],
                mask=valid[:, None] & (i_d < HEAD_DIM)[None, :],
                other=0.0,
            )
            b_new = tl.maximum(b_max, tl.max(b_lse, 0))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)  # no -inf - -inf
            b_old = tl.exp2(b_max - b_safe)
            b_weight = tl.exp2(b_lse - b_safe)
            b_sum = b_sum * b_old + tl.sum(b_weight, 0)
            b_acc = b_acc * b_old + tl.sum(b_out * b_weight[:, None], 0)
            b_max = b_new
        b_safe = tl.where(b_sum == 0.0, 1.0, b_sum)
        o_head = row.to(tl.int64) * NUM_HEADS + head
        b_out = (b_acc / b_safe).to(p_out.dtype.element_ty)
        tl.store(p_out + o_head * HEAD_DIM + i_d, b_out, mask=i_d < HEAD_DIM)
        if HAS_LSE:
            b_lse = tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_safe))
            tl.store(p_lse + o_head, b_lse * LN2)
        merge += tl.num_programs(0)
        if merge < num_merges:
            row = tl.load(p_merges + merge * 3)
            first = tl.load(p_merges + merge * 3 + 1)
            num_parts = tl.load(p_merges + merge * 3 + 2)
