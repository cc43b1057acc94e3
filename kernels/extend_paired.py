"""Ragged prefill on Hopper for work that fills the card many times over: a program computes a tile
of queries of two heads, a and b, that share keys and values, so that each tile of these is copied
to shared memory once for both.

Copies cost power, and power is the limit under load. While one head's softmax runs, the tensor
cores multiply the other's weights and values. The two accumulators leave a thread few registers
besides, so the queries stay in shared memory. The rest as in kernels/extend_gluon.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.extend_gluon import (
    barrier,
    clear_tail,
    operand,
    place,
    rescale,
    softmax,
    store,
    tile_bounds,
)

V_STAGES: gl.constexpr = gl.constexpr(2)


@gluon.jit
def _copy(d_x, row, column, full, x_s, i, count, STAGES: gl.constexpr):
    """Issue the copy of tile i."""
    slot = i % STAGES
    bar = full.index(slot)
    wanted = i < count
    mbarrier.expect(bar, d_x.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        d_x, [row + i * d_x.block_type.shape[0], column], bar, x_s.index(slot), pred=wanted
    )


@gluon.jit
def _attend(
    a_acc, a_max, a_sum, b_acc, b_max, b_sum, b_old, b_p, b_position,
    qa_s, qb_s, k_s, v_s, k_full, v_full, d_k, d_v, base, column,
    begin, end, count, tail, scale,
    MASKED: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Tiles begin .. end of keys. As the loop begins and ends, a_acc is in flight, and b_acc lacks
    the factor b_old and the values of the tile before, whose weights are b_p. count: tiles of the
    item; tail: the last one's keys, a whole tile if zeros fill it."""
    BLOCK_N: gl.constexpr = k_s.shape[1]
    O_LAYOUT: gl.constexpr = b_p.type.layout.parent
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([b_p.shape[0], BLOCK_N], gl.float32, S_LAYOUT)
    for j in range(begin, end):
        keys = k_s.index(j % STAGES).permute((1, 0))
        a_acc = warpgroup_mma_wait(0, deps=(a_acc,))
        barrier()  # all warps are done with keys j - 1
        _copy(d_k, base, column, k_full, k_s, j + STAGES - 1, count, STAGES)
        b_acc = rescale(b_acc, b_old)
        mbarrier.wait(k_full.index(j % STAGES), j // STAGES & 1)
        b_s = warpgroup_mma(qa_s, keys, zeros, use_acc=False, is_async=True)
        b_acc = warpgroup_mma(b_p, v_s.index((j - 1) % V_STAGES), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        b_w, a_max, a_sum, a_old = softmax(
            b_s, a_max, a_sum, b_position, j * BLOCK_N, scale, MASKED
        )
        a_p = operand(b_w, qa_s.dtype, O_LAYOUT)
        b_acc, a_p = warpgroup_mma_wait(0, deps=(b_acc, a_p))  # a_p: the wait stays below softmax
        barrier()  # all warps are done with values j - 1
        _copy(d_v, base, column, v_full, v_s, j + V_STAGES - 1, count, V_STAGES)
        a_acc = rescale(a_acc, a_old)
        mbarrier.wait(v_full.index(j % V_STAGES), j // V_STAGES & 1)
        if MASKED and (j + 1 == count) & (tail < BLOCK_N):
            clear_tail(v_s.index(j % V_STAGES), tail, NUM_WARPS)
        b_s = warpgroup_mma(qb_s, keys, zeros, use_acc=False, is_async=True)
        a_acc = warpgroup_mma(a_p, v_s.index(j % V_STAGES), a_acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        b_w, b_max, b_sum, b_old = softmax(
            b_s, b_max, b_sum, b_position, j * BLOCK_N, scale, MASKED
        )
        b_p = operand(b_w, qa_s.dtype, O_LAYOUT)
    return a_acc, a_max, a_sum, b_acc, b_max, b_sum, b_old, b_p


@gluon.jit(
    do_not_specialize=["num_tiles", "block_heads"],
    do_not_specialize_on_alignment=["p_tiles", "p_starts", "p_context", "p_regions"],
)
def paired_kernel(
    d_q, d_k, d_v, p_out, p_lse, p_tiles, p_starts, p_context, p_regions,
    num_tiles, block_heads, scale, v_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, DIRECT: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """One program an item: a tile of queries of two heads that share keys and values."""
    BLOCK_M: gl.constexpr = d_q.block_type.shape[0]
    BLOCK_N: gl.constexpr = d_k.block_type.shape[0]
    HEAD_DIM: gl.constexpr = d_q.block_type.shape[1]
    i_tile, pair = place(gl.program_id(0), num_tiles, block_heads // 2, HEADS // 2)
    head = 2 * pair
    query, nearest, context, base, end = tile_bounds(
        p_tiles, p_starts, p_context, p_regions, i_tile, BLOCK_M, DIRECT
    )
    count = (end + BLOCK_N - 1) // BLOCK_N
    # Only an item's last tile reaches beyond the row's end.
    tail = context - (count - 1) * BLOCK_N if DIRECT else BLOCK_N
    column = head // GROUP * HEAD_DIM
    qa_s = gl.allocate_shared_memory(d_q.dtype, [BLOCK_M, HEAD_DIM], d_q.layout)
    qb_s = gl.allocate_shared_memory(d_q.dtype, [BLOCK_M, HEAD_DIM], d_q.layout)
    k_s = gl.allocate_shared_memory(d_k.dtype, [STAGES, BLOCK_N, HEAD_DIM], d_k.layout)
    v_s = gl.allocate_shared_memory(d_v.dtype, [V_STAGES, BLOCK_N, HEAD_DIM], d_v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(q_full, 2 * d_q.block_type.nbytes)
    tma.async_copy_global_to_shared(d_q, [query, head * HEAD_DIM], q_full, qa_s)
    tma.async_copy_global_to_shared(d_q, [query, head * HEAD_DIM + HEAD_DIM], q_full, qb_s)
    for i in gl.static_range(STAGES):
        _copy(d_k, base, column, k_full, k_s, i, count, STAGES)
    for i in gl.static_range(V_STAGES):
        _copy(d_v, base, column, v_full, v_s, i, count, V_STAGES)
    mbarrier.wait(q_full, 0)

    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, HEAD_DIM, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    b_position = nearest + gl.arange(0, BLOCK_M, ROWS)
    a_max = gl.full([BLOCK_M], float("-inf"), gl.float32, ROWS)
    b_max = gl.full([BLOCK_M], float("-inf"), gl.float32, ROWS)
    b_acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, O_LAYOUT)
    zero = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, O_LAYOUT)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)

    mbarrier.wait(k_full.index(0), 0)
    keys = k_s.index(0).permute((1, 0))
    b_s = warpgroup_mma(qa_s, keys, zeros, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    b_w, a_max, a_sum, _ = softmax(b_s, a_max, None, b_position, 0, scale, True)
    a_p = operand(b_w, d_q.dtype, O_LAYOUT)
    mbarrier.wait(v_full.index(0), 0)
    if (count == 1) & (tail < BLOCK_N):
        clear_tail(v_s.index(0), tail, NUM_WARPS)
    b_s = warpgroup_mma(qb_s, keys, zeros, use_acc=False, is_async=True)
    a_acc = warpgroup_mma(a_p, v_s.index(0), zero, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(b_s,))
    b_w, b_max, b_sum, b_old = softmax(b_s, b_max, None, b_position, 0, scale, True)
    b_p = operand(b_w, d_q.dtype, O_LAYOUT)
    whole = gl.minimum(gl.maximum((nearest + 1) // BLOCK_N, 1), count)
    a_acc, a_max, a_sum, b_acc, b_max, b_sum, b_old, b_p = _attend(
        a_acc, a_max, a_sum, b_acc, b_max, b_sum, b_old, b_p, b_position,
        qa_s, qb_s, k_s, v_s, k_full, v_full, d_k, d_v, base, column,
        1, whole, count, tail, scale, False, STAGES, NUM_WARPS,
    )  # fmt: skip
    a_acc, a_max, a_sum, b_acc, b_max, b_sum, b_old, b_p = _attend(
        a_acc, a_max, a_sum, b_acc, b_max, b_sum, b_old, b_p, b_position,
        qa_s, qb_s, k_s, v_s, k_full, v_full, d_k, d_v, base, column,
        whole, count, count, tail, scale, True, STAGES, NUM_WARPS,
    )  # fmt: skip
    a_acc = warpgroup_mma_wait(0, deps=(a_acc,))
    b_acc = rescale(b_acc, b_old)
    b_acc = warpgroup_mma(b_p, v_s.index((count - 1) % V_STAGES), b_acc, is_async=True)
    store(a_acc, a_max, a_sum, b_position, p_out, p_lse, query, head, context, v_scale,
          HEADS, BLOCK_M, NUM_WARPS)  # fmt: skip
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
    store(b_acc, b_max, b_sum, b_position, p_out, p_lse, query, head + 1, context, v_scale,
          HEADS, BLOCK_M, NUM_WARPS)  # fmt: skip
