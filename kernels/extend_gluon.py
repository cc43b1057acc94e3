"""Ragged prefill on Hopper, written in Gluon: softmax runs while the tensor cores work.

Stock Triton waits for each product of queries and keys before the softmax that needs it, so that
the tensor cores idle. Here the product for tile j is issued before the product of the weights and
values of tile j - 1, and the softmax of tile j runs beside the latter (FlashAttention-3,
arXiv:2407.08608, section 3.2). K and V come by TMA through rings of buffers with memory barriers.

Under load the card's power is the limit, not its tensor cores, so that work spared is time gained:
the queries stay in registers, sums stay apart by thread until the end, and the accumulator is
rescaled only when a maximum has grown by more than SLACK (as FlashAttention-4 does).

All warps compute, and issue the copies of later tiles themselves. Inputs are those of
kernels/extend_tma.py; kernels/extend_hopper.py launches the kernel. Gluon has no interpreter: a
device of capability 9 alone runs it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
SLACK: gl.constexpr = gl.constexpr(8.0)
"""In base 2: weights reach 256 at most, which every type holds."""
# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def _rescaling(count):
    """(assembly, constraints): a thread's `count` values times their rows' factors, skipped where
    no thread of the warp has a factor but 1. A thread holds two rows, in turns of two values."""
    first, second = 2 * count, 2 * count + 2
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    text = f"""{{ .reg .pred p;
        setp.neu.f32 p, ${first}, 0f3F800000;
        setp.neu.or.f32 p, ${second}, 0f3F800000, p;
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra.uni KEPT;
        {products}
        KEPT: }}"""
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count
    return gl.constexpr(text), gl.constexpr(",".join(constraints))


RESCALE_32, OPERANDS_32 = _rescaling(32)
RESCALE_64, OPERANDS_64 = _rescaling(64)


@gluon.jit
def rescale(b_acc, b_old):
    """b_acc times its rows' factors b_old."""
    b_old = gl.convert_layout(b_old, gl.SliceLayout(1, b_acc.type.layout))
    b_acc, b_old = gl.broadcast(b_acc, b_old[:, None])
    if b_acc.shape[1] == 64:
        return gl.inline_asm_elementwise(
            RESCALE_32, OPERANDS_32, [b_acc, b_old], dtype=gl.float32, is_pure=True, pack=32
        )
    else:  # noqa: RET505 - a constant decides, and the other branch must not be compiled
        return gl.inline_asm_elementwise(
            RESCALE_64, OPERANDS_64, [b_acc, b_old], dtype=gl.float32, is_pure=True, pack=64
        )


@gluon.jit
def _exp2(x):
    """2 ** x; results below 2 ** -126 become 0, which spares two instructions an element."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def softmax(b_s, b_max, b_sum, b_position, start, scale, MASKED: gl.constexpr):
    """(weights, maximum, sum, factor of what came before) after the scores of keys start ... The
    maximum is one up to SLACK; the sum is in 8 parts, two to a thread, None = of no keys."""
    if MASKED:
        layout: gl.constexpr = b_s.type.layout
        i_n = start + gl.arange(0, b_s.shape[1], gl.SliceLayout(0, layout))
        b_s = gl.where(b_position[:, None] >= i_n[None, :], b_s, float("-inf"))
    # scale > 0: the maximum commutes with it, and score * scale - maximum is one operation.
    b_new = gl.max(b_s, 1) * scale
    b_new = gl.where(b_new > b_max + SLACK, b_new, b_max)
    b_p = _exp2(b_s * scale - b_new[:, None])
    b_old = _exp2(b_max - b_new)
    b_part = gl.sum(gl.reshape(b_p, [b_p.shape[0], b_p.shape[1] // 8, 8]), 1)
    if b_sum is not None:
        b_part += b_sum * gl.convert_layout(b_old, gl.SliceLayout(1, b_part.type.layout))[:, None]
    return b_p, b_new, b_part, b_old


@gluon.jit
def operand(b_p, dtype: gl.constexpr, layout: gl.constexpr):
    """Weights in the registers from which the tensor cores read their left operand."""
    return gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def clear_tail(buffer, length, NUM_WARPS: gl.constexpr):
    """Zero a tile's rows from `length` on: they may be NaN, and 0 x NaN is NaN."""
    rows: gl.constexpr = buffer.shape[0]
    columns: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8],
                                            [NUM_WARPS, 1], [1, 0])  # fmt: skip
    i_n = gl.arange(0, rows, gl.SliceLayout(1, layout))
    b_v = buffer.load(layout)
    barrier()
    buffer.store(gl.where((i_n < length)[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    barrier()


@gluon.jit
def tile_bounds(p_tiles, p_starts, p_context, p_regions, i_tile, BLOCK_M: gl.constexpr,
            DIRECT: gl.constexpr):  # fmt: skip
    """A tile's (row of its first query, its position, context of the row, row where its keys begin,
    number of keys visited)."""
    row = gl.load(p_tiles + i_tile * 2)
    first = gl.load(p_tiles + i_tile * 2 + 1)
    q_begin = gl.load(p_starts + row)
    q_length = gl.load(p_starts + row + 1) - q_begin
    if DIRECT:
        context = q_length
        base = q_begin
    else:
        context = gl.load(p_context + row)
        base = gl.load(p_regions + row)
    nearest = context - q_length + first
    end = gl.minimum(nearest + BLOCK_M, context)
    return q_begin + first, nearest, context, base, end


@gluon.jit
def store(b_acc, b_max, b_sum, b_position, p_out, p_lse, query, head, context, v_scale,
           HEADS: gl.constexpr, BLOCK_M: gl.constexpr, NUM_WARPS: gl.constexpr):  # fmt: skip
    HEAD_DIM: gl.constexpr = b_acc.shape[1]
    b_sum = gl.convert_layout(gl.sum(b_sum, 1), b_max.type.layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8],
                                            [NUM_WARPS, 1], [1, 0])  # fmt: skip
    if p_lse is not None:
        rows: gl.constexpr = b_max.type.layout
        i_pair = (query + gl.arange(0, BLOCK_M, rows)).to(gl.int64) * HEADS + head
        gl.store(p_lse + i_pair, (b_max + gl.log2(b_sum)) * LN2, mask=b_position < context)
    b_scale = gl.convert_layout(v_scale / b_sum, gl.SliceLayout(1, b_acc.type.layout))
    b_out = (b_acc * b_scale[:, None]).to(p_out.dtype.element_ty)
    b_out = gl.convert_layout(b_out, layout)
    valid = gl.convert_layout(b_position, gl.SliceLayout(1, layout)) < context
    i_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    i_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    o_out = ((query + i_m).to(gl.int64) * HEADS + head)[:, None] * HEAD_DIM + i_d[None, :]
    gl.store(p_out + o_out, b_out, mask=valid[:, None])


@gluon.jit
def _load(d_k, d_v, base, column, full, k_s, v_s, i, count, STAGES: gl.constexpr):
    """Issue load i: K of tile i and V of tile i - 1, which one iteration uses. The first V and the
    last K only keep the loads alike."""
    slot = i % STAGES
    bar = full.index(slot)
    wanted = i <= count
    k_row = base + i * d_k.block_type.shape[0]
    v_row = base + gl.maximum(i - 1, 0) * d_k.block_type.shape[0]
    mbarrier.expect(bar, 2 * d_k.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(d_k, [k_row, column], bar, k_s.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d_v, [v_row, column], bar, v_s.index(slot), pred=wanted)


@gluon.jit
def _attend(
    b_acc, b_max, b_sum, b_old, b_p, b_position, q_s, k_s, v_s, full,
    d_k, d_v, base, column, begin, end, count, scale,
    MASKED: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Scores and weights of tiles begin .. end, beside the weighted values of the tile before each.
    b_acc is in flight, and still without the factor b_old, when the loop begins and ends: what
    follows a wait cannot run beside the products, and the compiler would move a wait up as far as
    it can. count: tiles of the item."""
    BLOCK_N: gl.constexpr = k_s.shape[1]
    O_LAYOUT: gl.constexpr = b_p.type.layout.parent
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([b_p.shape[0], BLOCK_N], gl.float32, S_LAYOUT)
    b_q = q_s.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    for j in range(begin, end):
        slot = j % STAGES
        b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
        barrier()  # all warps are done with load j - 1
        b_acc = rescale(b_acc, b_old)
        mbarrier.wait(full.index(slot), j // STAGES & 1)
        b_s = warpgroup_mma(b_q, k_s.index(slot).permute((1, 0)), zeros, use_acc=False,
                            is_async=True)  # fmt: skip
        b_acc = warpgroup_mma(b_p, v_s.index(slot), b_acc, is_async=True)
        _load(d_k, d_v, base, column, full, k_s, v_s, j + STAGES - 1, count, STAGES)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        b_w, b_max, b_sum, b_old = softmax(
            b_s, b_max, b_sum, b_position, j * BLOCK_N, scale, MASKED
        )
        b_p = operand(b_w, q_s.dtype, O_LAYOUT)
    return b_acc, b_max, b_sum, b_old, b_p


@gluon.jit
def place(item, num_tiles, block_heads, HEADS: gl.constexpr):
    """(tile, head) of an item. Heads are taken in blocks, whose keys and values the programs that
    run at once share; within a block items are in the order of the tiles, longest first."""
    first = item // (num_tiles * block_heads) * block_heads
    inside = item - first * num_tiles
    width = gl.minimum(block_heads, HEADS - first)
    return inside // width, first + inside % width


@gluon.jit(
    do_not_specialize=["num_tiles", "block_heads"],
    do_not_specialize_on_alignment=["p_tiles", "p_starts", "p_context", "p_regions"],
)
def pipelined_kernel(
    d_q, d_k, d_v, p_out, p_lse, p_tiles, p_starts, p_context, p_regions,
    num_tiles, block_heads, scale, v_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, DIRECT: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """One program an item: a tile of queries of one head."""
    BLOCK_M: gl.constexpr = d_q.block_type.shape[0]
    BLOCK_N: gl.constexpr = d_k.block_type.shape[0]
    HEAD_DIM: gl.constexpr = d_q.block_type.shape[1]
    i_tile, head = place(gl.program_id(0), num_tiles, block_heads, HEADS)
    query, nearest, context, base, end = tile_bounds(
        p_tiles, p_starts, p_context, p_regions, i_tile, BLOCK_M, DIRECT
    )
    count = (end + BLOCK_N - 1) // BLOCK_N
    column = head // GROUP * HEAD_DIM
    q_s = gl.allocate_shared_memory(d_q.dtype, [BLOCK_M, HEAD_DIM], d_q.layout)
    k_s = gl.allocate_shared_memory(d_k.dtype, [STAGES, BLOCK_N, HEAD_DIM], d_k.layout)
    v_s = gl.allocate_shared_memory(d_v.dtype, [STAGES, BLOCK_N, HEAD_DIM], d_v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(q_full, d_q.block_type.nbytes)
    tma.async_copy_global_to_shared(d_q, [query, head * HEAD_DIM], q_full, q_s)
    for i in gl.static_range(STAGES):
        _load(d_k, d_v, base, column, full, k_s, v_s, i, count, STAGES)
    mbarrier.wait(q_full, 0)

    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, HEAD_DIM, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    b_position = nearest + gl.arange(0, BLOCK_M, ROWS)
    b_max = gl.full([BLOCK_M], float("-inf"), gl.float32, ROWS)
    b_acc = warpgroup_mma_init(gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, O_LAYOUT))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)

    mbarrier.wait(full.index(0), 0)
    keys = k_s.index(0).permute((1, 0))
    b_s = warpgroup_mma(q_s, keys, zeros, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    # Every query sees key 0, so no maximum is infinite from here on.
    b_w, b_max, b_sum, b_old = softmax(b_s, b_max, None, b_position, 0, scale, True)
    b_p = operand(b_w, q_s.dtype, O_LAYOUT)
    whole = gl.minimum(gl.maximum((nearest + 1) // BLOCK_N, 1), count)
    b_acc, b_max, b_sum, b_old, b_p = _attend(
        b_acc, b_max, b_sum, b_old, b_p, b_position, q_s, k_s, v_s, full,
        d_k, d_v, base, column, 1, whole, count, scale, False, STAGES, NUM_WARPS,
    )  # fmt: skip
    b_acc, b_max, b_sum, b_old, b_p = _attend(
        b_acc, b_max, b_sum, b_old, b_p, b_position, q_s, k_s, v_s, full,
        d_k, d_v, base, column, whole, count, count, scale, True, STAGES, NUM_WARPS,
    )  # fmt: skip
    slot = count % STAGES
    mbarrier.wait(full.index(slot), count // STAGES & 1)
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
    if DIRECT:
        # Only an item's last tile reaches beyond the row's end.
        length = context - (count - 1) * BLOCK_N
        if length < BLOCK_N:
            clear_tail(v_s.index(slot), length, NUM_WARPS)
    b_acc = rescale(b_acc, b_old)
    b_acc = warpgroup_mma(b_p, v_s.index(slot), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
    store(b_acc, b_max, b_sum, b_position, p_out, p_lse, query, head, context, v_scale,
          HEADS, BLOCK_M, NUM_WARPS)  # fmt: skip
