"""The device side of batch-invariant attention; kernels/invariant.py launches it, and says what
makes it so.

Where a token lies is looked up one tile ahead, as in kernels/extend.py. Positions outside a row's
visible ones repeat one of these, so every address read is one of the row's own."""

import triton
import triton.language as tl

from kernels.jit import LN2, LOG2E, dot, soft_cap

ONE = tl.constexpr(0)
FOLD = tl.constexpr(1)
PARTS = tl.constexpr(2)
"""What a program does with splits: there is one; fold all of the tile's; leave partial results."""


@triton.jit
def _slots(p_row, positions, lowest, last, PAGE: tl.constexpr):
    """Slots of positions, those outside lowest .. last replaced by the nearer of the two."""
    positions = tl.maximum(tl.minimum(positions, last), lowest)
    return tl.load(p_row + positions // PAGE).to(tl.int64) * PAGE + positions % PAGE


@triton.jit
def _split(
    b_q, b_position, p_k, p_v, p_row, begin, end, lowest, last, stride_slot, scale, softcap,
    v_scale, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The normalised result over keys begin .. end and its base-2 log-sum-exp. begin: a multiple of
    BLOCK_N."""
    i_n = tl.arange(0, BLOCK_N)
    i_d = tl.arange(0, BLOCK_D)
    b_max = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([b_q.shape[0]], tl.float32)
    b_acc = tl.zeros([b_q.shape[0], BLOCK_D], tl.float32)
    b_slots = _slots(p_row, begin + i_n, lowest, last, PAGE)
    for start in range(begin, end, BLOCK_N):
        o_kv = b_slots[:, None] * stride_slot + i_d[None, :]
        if BLOCK_D == HEAD_DIM:
            b_k = tl.load(p_k + o_kv).to(b_q.dtype)
            b_v = tl.load(p_v + o_kv).to(b_q.dtype)
        else:
            b_k = tl.load(p_k + o_kv, mask=i_d[None, :] < HEAD_DIM, other=0.0).to(b_q.dtype)
            b_v = tl.load(p_v + o_kv, mask=i_d[None, :] < HEAD_DIM, other=0.0).to(b_q.dtype)
        b_s = tl.zeros([b_q.shape[0], BLOCK_N], tl.float32)
        b_s = dot(b_q, tl.trans(b_k), b_s, UPCAST) * scale
        if softcap is not None:
            b_s = soft_cap(b_s, softcap) * LOG2E
        distance = b_position[:, None] - (start + i_n)[None, :]
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_old = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_acc = dot(b_p.to(b_q.dtype), b_v, b_acc * b_old[:, None], UPCAST)
        b_max = b_new
        b_slots = _slots(p_row, start + BLOCK_N + i_n, lowest, last, PAGE)
    b_none = b_sum == 0.0  # a NaN has seen something
    b_safe = tl.where(b_none, 1.0, b_sum)
    b_out = b_acc * tl.where(b_none, 0.0, v_scale / b_safe)[:, None]
    return b_out, tl.where(b_none, float("-inf"), b_max + tl.log2(b_safe))


@triton.jit
def _fold(b_acc, b_max, b_sum, b_part, b_lse):
    """The sum of partial results so far, its largest log-sum-exp and its weight, and one more. What
    saw nothing weighs nothing, and a first result that did see keeps its bits."""
    b_new = tl.maximum(b_max, b_lse)
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_old = tl.exp2(b_max - b_shift)
    b_weight = tl.exp2(b_lse - b_shift)
    b_acc = b_acc * b_old[:, None] + b_part * b_weight[:, None]
    return b_acc, b_new, b_sum * b_old + b_weight


@triton.jit
def _folded(b_acc, b_max, b_sum):
    """The merged result and its base-2 log-sum-exp."""
    b_safe = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = tl.div_rn(b_acc, tl.broadcast_to(b_safe[:, None], b_acc.shape))
    return b_out, b_max + tl.log2(b_safe)


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows", "num_tokens", "num_splits"],
    do_not_specialize_on_alignment=["p_table", "p_starts", "p_context"],
)
def invariant_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_table, p_tiles, p_starts, p_context,
    stride_q, stride_head, stride_slot, stride_table, num_tiles, num_rows, num_tokens, num_splits,
    scale, softcap, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, FORM: tl.constexpr, HEAD_FAST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile and KV head, p): of form PARTS, splits p, p + programs, ... of num_splits."""
    if HEAD_FAST:
        i_tile = tl.program_id(0) // (HEADS // GROUP)
        i_block = tl.program_id(0) % (HEADS // GROUP)
    else:
        i_tile = tl.program_id(0) % num_tiles
        i_block = tl.program_id(0) // num_tiles
    row = tl.load(p_tiles + i_tile * 2)
    first = tl.load(p_tiles + i_tile * 2 + 1)
    if row < 0:
        return
    q_begin = tl.load(p_starts + row)
    q_end = tl.load(p_starts + row + 1, mask=row < num_rows, other=num_tokens)
    context = tl.load(p_context + row, mask=row < num_rows, other=0)
    num_packed = (q_end - q_begin) * GROUP
    prefix = context - (q_end - q_begin)
    i_packed = first + tl.arange(0, BLOCK_M)
    b_valid = i_packed < num_packed
    i_packed = tl.minimum(i_packed, num_packed - 1)
    b_token = (q_begin + i_packed // GROUP).to(tl.int64)
    b_head = i_block * GROUP + i_packed % GROUP
    b_position = prefix + i_packed // GROUP
    i_d = tl.arange(0, BLOCK_D)
    in_head = i_d[None, :] < HEAD_DIM
    o_q = (b_token * stride_q + b_head * stride_head)[:, None] + i_d[None, :]
    b_q = tl.load(p_q + o_q, mask=in_head, other=0.0)

    # Keys [begin, end) are seen by some query of the tile. What lies before `lowest` may have been
    # given to other rows.
    end = tl.maximum(prefix + (tl.minimum(first + BLOCK_M, num_packed) - 1) // GROUP + 1, 0)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(prefix + first // GROUP - WINDOW + 1, 0)
    begin = lowest // BLOCK_N * BLOCK_N
    last = tl.maximum(context - 1, 0)
    lowest = tl.minimum(lowest, last)
    p_k += i_block * HEAD_DIM
    p_v += i_block * HEAD_DIM
    p_row = p_table + tl.minimum(row, num_rows - 1).to(tl.int64) * stride_table
    o_pair = b_token * HEADS + b_head
    mask = b_valid[:, None] & in_head
    if FORM == ONE:
        b_out, b_lse = _split(
            b_q, b_position, p_k, p_v, p_row, begin, end, lowest, last, stride_slot, scale, softcap,
            v_scale, WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, UPCAST,
        )  # fmt: skip
    elif FORM == FOLD:
        b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b_lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
            b_part, b_part_lse = _split(
                b_q, b_position, p_k, p_v, p_row, tl.maximum(begin, split * SPLIT),
                tl.minimum(end, split * SPLIT + SPLIT), lowest, last, stride_slot, scale, softcap,
                v_scale, WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, UPCAST,
            )  # fmt: skip
            b_out, b_lse, b_sum = _fold(b_out, b_lse, b_sum, b_part, b_part_lse)
        b_out, b_lse = _folded(b_out, b_lse, b_sum)
    else:
        for split in range(tl.program_id(1), num_splits, tl.num_programs(1)):
            b_part, b_part_lse = _split(
                b_q, b_position, p_k, p_v, p_row, tl.maximum(begin, split * SPLIT),
                tl.minimum(end, split * SPLIT + SPLIT), lowest, last, stride_slot, scale, softcap,
                v_scale, WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, UPCAST,
            )  # fmt: skip
            o_part = o_pair + split * (num_tokens.to(tl.int64) * HEADS)
            b_some = b_part_lse != float("-inf")  # other partial results are not read
            o_out = o_part[:, None] * HEAD_DIM + i_d[None, :]
            tl.store(p_out + o_out, b_part, mask=mask & b_some[:, None])
            tl.store(p_lse + o_part, b_part_lse, mask=b_valid)
    if FORM != PARTS:
        o_out = o_pair[:, None] * HEAD_DIM + i_d[None, :]
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=mask)
        if p_lse is not None:
            tl.store(p_lse + o_pair, b_lse * LN2, mask=b_valid)


@triton.jit(do_not_specialize=["num_pairs", "num_splits"])
def fold_kernel(
    p_part, p_part_lse, p_out, p_lse, num_pairs, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Fold the partial results of (token, head) pairs in order of splits."""
    i_pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    i_d = tl.arange(0, BLOCK_D)
    valid = i_pair < num_pairs
    in_head = i_d[None, :] < HEAD_DIM
    b_acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_P], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_P], tl.float32)
    for split in range(num_splits):
        o_part = i_pair + split * num_pairs.to(tl.int64)
        b_lse = tl.load(p_part_lse + o_part, mask=valid, other=float("-inf"))
        some = (b_lse != float("-inf"))[:, None] & in_head
        b_part = tl.load(p_part + o_part[:, None] * HEAD_DIM + i_d[None, :], mask=some, other=0.0)
        b_acc, b_max, b_sum = _fold(b_acc, b_max, b_sum, b_part, b_lse)
    b_out, b_lse = _folded(b_acc, b_max, b_sum)
    o_out = i_pair[:, None] * HEAD_DIM + i_d[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=valid[:, None] & in_head)
    if p_lse is not None:
        tl.store(p_lse + i_pair, b_lse * LN2, mask=valid)
