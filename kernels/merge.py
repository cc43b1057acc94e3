"""Merges partial attention results by their log-sum-exp.

A partial result is an output normalised over the keys that its program saw, float32, and the base-2
log-sum-exp of their scores; -inf means that it saw none, and it weighs nothing. The sum runs in the
order of parts, so that the same parts give the same bits."""

import triton
import triton.language as tl

from kernels.jit import LN2, await_inputs


@triton.jit
def merge_parts(
    p_out, p_partial_out, p_partial_lse, first, num_parts, i_g, i_d, stride_part,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The result of GROUP heads from partial results first .. first + num_parts, written to p_out
    [GROUP, HEAD_DIM]; returns its base-2 log-sum-exp [BLOCK_G]. Pointers stand at the first head;
    stride_part: heads of a part. BLOCK_S: parts read at once."""
    i_s = tl.arange(0, BLOCK_S)
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, num_parts, BLOCK_S):
        part = (first + start + i_s).to(tl.int64)
        valid = (start + i_s < num_parts)[:, None] & (i_g < GROUP)[None, :]
        o_head = part[:, None] * stride_part + i_g[None, :]
        # .cg: past the first-level cache, which may hold what an earlier launch left there.
        b_lse = tl.load(
            p_partial_lse + o_head, mask=valid, other=float("-inf"), cache_modifier=".cg"
        )
        b_out = tl.load(
            p_partial_out + o_head[:, :, None] * HEAD_DIM + i_d[None, None, :],
            mask=valid[:, :, None] & (i_d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)  # no -inf - -inf
        b_old = tl.exp2(b_max - b_safe)
        b_weight = tl.exp2(b_lse - b_safe[None, :])
        b_sum = b_sum * b_old + tl.sum(b_weight, 0)
        b_acc = b_acc * b_old[:, None] + tl.sum(b_out * b_weight[:, :, None], 0)
        b_max = b_new
    b_safe = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = (b_acc / b_safe[:, None]).to(p_out.dtype.element_ty)
    valid = (i_g < GROUP)[:, None] & (i_d < HEAD_DIM)[None, :]
    tl.store(p_out + i_g[:, None] * HEAD_DIM + i_d[None, :], b_out, mask=valid)
    return tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_safe))


@triton.jit
def merge_kernel(
    p_out, p_lse, p_partial_out, p_partial_lse, p_row_parts,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, HAS_LSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query head of one row; grid (rows, heads). row_parts int32 [rows, 3]: first partial
    result, splits, partial results."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    # The planner wrote these at least two launches ago: they need not wait for the partials.
    first = tl.load(p_row_parts + row * 3)
    num_parts = tl.load(p_row_parts + row * 3 + 2)
    await_inputs(EARLY)
    if num_parts == 1:
        return
    i_g = tl.arange(0, 1)
    o_head = row.to(tl.int64) * NUM_HEADS + head
    b_lse = merge_parts(
        p_out + o_head * HEAD_DIM,
        p_partial_out + head * HEAD_DIM,
        p_partial_lse + head,
        first, num_parts, i_g, tl.arange(0, BLOCK_D), NUM_HEADS,
        1, HEAD_DIM, 1, BLOCK_D, BLOCK_S,
    )  # fmt: skip
    if HAS_LSE:
        tl.store(p_lse + o_head + i_g, b_lse * LN2)
