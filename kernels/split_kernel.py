"""The device side of split-KV decode; kernels/split_kv.py launches it.

Where a token lies is looked up one tile ahead and carried into the next iteration: a look-up inside
the iteration would make K and V wait for it, and Triton then leaves them a single buffer. Positions
past a split's end repeat its last token, so every address read is one of the row's own and nothing
but the scores needs a mask."""

import triton
import triton.language as tl

from kernels.jit import LN2, LOG2E, await_inputs, dot, soft_cap
from kernels.merge import merge_parts

MERGE_LAST = tl.constexpr(0)
MERGE_APART = tl.constexpr(1)
"""Who merges: the last program to arrive, or a kernel of its own."""


@triton.jit
def slots_of(p_row, position, PAGE_SIZE: tl.constexpr):
    """Slots of a row's positions: through its pages, or (PAGE_SIZE 0 or 1) straight from a list."""
    if PAGE_SIZE <= 1:
        return tl.load(p_row + position)
    return tl.load(p_row + position // PAGE_SIZE) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_starts"])
def decode_kernel(  # noqa: C901
    p_q, p_k, p_v, p_out, p_lse, p_partial_out, p_partial_lse, p_items, p_num_items,
    p_arrivals, p_slots, p_starts, stride_row, stride_q_row, stride_q_head, qk_scale, v_scale, cap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_LSE: tl.constexpr, UPCAST: tl.constexpr, MERGE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    item = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    # Read beside the item, whose words mean nothing beyond the last one: one latency, not two.
    num_items = tl.load(p_num_items)
    p_item = p_items + item * 8
    row = tl.load(p_item)
    begin = tl.load(p_item + 1)
    end = tl.load(p_item + 2)
    part = tl.load(p_item + 3)
    first_part = tl.load(p_item + 4)
    num_parts = tl.load(p_item + 5)
    num_splits = tl.load(p_item + 6)
    if item >= num_items:
        return

    i_h = tl.arange(0, BLOCK_H)
    i_d = tl.arange(0, BLOCK_D)
    i_n = tl.arange(0, BLOCK_N)
    in_head = i_d < HEAD_DIM
    p_query = p_q + row.to(tl.int64) * stride_q_row + (head * GROUP + i_h[:, None]) * stride_q_head
    in_q = (i_h < GROUP)[:, None] & in_head[None, :]
    b_q = tl.load(p_query + i_d[None, :], mask=in_q, other=0.0)
    if PAGE_SIZE == 0:
        p_row = p_slots + tl.load(p_starts + row)
    else:
        p_row = p_slots + row.to(tl.int64) * stride_row
    p_keys = p_k + head * HEAD_DIM
    p_values = p_v + head * HEAD_DIM

    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # summed over warps once, at the end
    b_acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    last = tl.maximum(end - 1, 0)
    b_slot = slots_of(p_row, tl.minimum(begin + i_n, last), PAGE_SIZE)
    for start in range(begin, end, BLOCK_N):
        o_slot = b_slot.to(tl.int64) * SLOT_STRIDE
        if BLOCK_D == HEAD_DIM:
            b_k = tl.load(p_keys + o_slot[:, None] + i_d[None, :])
            b_v = tl.load(p_values + o_slot[:, None] + i_d[None, :])
        else:
            b_k = tl.load(p_keys + o_slot[:, None] + i_d[None, :], mask=in_head[None, :], other=0.0)
            b_v = tl.load(
                p_values + o_slot[:, None] + i_d[None, :], mask=in_head[None, :], other=0.0
            )
        b_slot = slots_of(p_row, tl.minimum(start + BLOCK_N + i_n, last), PAGE_SIZE)
        b_s = dot(
            b_q, tl.trans(b_k.to(b_q.dtype)), tl.zeros([BLOCK_H, BLOCK_N], tl.float32), UPCAST
        )
        b_s *= qk_scale
        if HAS_CAP:
            b_s = soft_cap(b_s, cap)
        b_s = tl.where((start + i_n < end)[None, :], b_s * LOG2E, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_old = tl.exp2(b_max - b_new)
        b_p = tl.exp2(b_s - b_new[:, None])
        b_sums = b_sums * b_old[:, None] + b_p
        b_acc = dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc * b_old[:, None], UPCAST)
        b_max = b_new

    b_sum = tl.sum(b_sums, 1)
    b_sum_safe = tl.where(b_sum == 0.0, 1.0, b_sum)  # nothing seen: the result is 0
    b_out = b_acc * (v_scale / b_sum_safe)[:, None]
    b_lse = tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_sum_safe))
    o_row = (row.to(tl.int64) * NUM_KV_HEADS + head) * GROUP
    if num_parts == 1:
        p_o = p_out + (o_row + i_h)[:, None] * HEAD_DIM + i_d[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=in_q)
        if HAS_LSE:
            tl.store(p_lse + o_row + i_h, b_lse * LN2, mask=i_h < GROUP)
    else:
        o_part = (part.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + i_h
        tl.store(p_partial_out + o_part[:, None] * HEAD_DIM + i_d[None, :], b_out, mask=in_q)
        tl.store(p_partial_lse + o_part, b_lse, mask=i_h < GROUP)
        if MERGE == MERGE_LAST:
            tl.debug_barrier()  # all warps' stores come before the count
            p_count = p_arrivals + row * NUM_KV_HEADS + head
            arrived = tl.atomic_add(p_count, 1, sem="acq_rel")
            if arrived == num_splits - 1:
                i_g = tl.arange(0, BLOCK_G)
                b_lse_all = merge_parts(
                    p_out + o_row * HEAD_DIM,
                    p_partial_out + head * GROUP * HEAD_DIM,
                    p_partial_lse + head * GROUP,
                    first_part, num_parts, i_g, i_d, NUM_KV_HEADS * GROUP,
                    GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, BLOCK_S,
                )  # fmt: skip
                if HAS_LSE:
                    tl.store(p_lse + o_row + i_g, b_lse_all * LN2, mask=i_g < GROUP)
                tl.store(p_count, 0)  # ready for the next layer
