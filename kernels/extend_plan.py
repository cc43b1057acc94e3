"""Device-side planning of ragged prefill: which program computes which queries, and where a row's
keys lie.

A row's new tokens are cut into tiles of block_m packed queries; a packed query is a (token, query
head) pair when the heads of a KV head share a tile, else a token. The table holds the tiles of all
rows, those with most keys to visit first, so that no long tile starts last. Every place of the
table is found by counting: a row's tiles with more keys than a given number are a closed form, so
nothing is sorted and the lengths never leave the device. Made once a step, shared by all layers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.declare import Rows

BLOCK_ROWS = 64
BLOCK_TILES = 64
ALIGN = 128
"""A row's region of a gathered workspace begins and ends at a multiple of this many tokens, so that
a tile of keys never holds two rows'."""
NO_LIMIT = 2**31 - 1


@triton.jit
def _lengths(p_starts, p_context, rows, num_rows, num_tokens):
    """(new tokens, context) of rows. Row num_rows stands for packed tokens beyond the last row's:
    they see nothing. Rows past it are empty."""
    begins = tl.load(p_starts + rows, mask=rows <= num_rows, other=0)
    ends = tl.load(p_starts + rows + 1, mask=rows < num_rows, other=0)
    ends = tl.where(rows == num_rows, num_tokens, ends)
    context = tl.load(p_context + rows, mask=rows < num_rows, other=0)
    return tl.maximum(ends - begins, 0), context


@triton.jit
def _packed(rows, new, num_rows, min_tokens, below_tokens, PACK: tl.constexpr):
    """Packed queries of the rows to be cut, 0 for others."""
    chosen = (new >= min_tokens) & (new < below_tokens)
    chosen = tl.where(rows == num_rows, min_tokens <= 1, chosen)
    return tl.where(chosen, new * PACK, 0)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "max_tiles", "min_tokens", "below_tokens"],
    do_not_specialize_on_alignment=["p_starts", "p_context"],
)
def _tiles_kernel(
    p_starts,
    p_context,
    p_tiles,
    num_rows,
    num_tokens,
    max_tiles,
    min_tokens,
    below_tokens,
    PACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    i_tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    b_row = tl.full([BLOCK_T], -1, tl.int32)
    b_first = tl.zeros([BLOCK_T], tl.int32)
    b_keys = tl.zeros([BLOCK_T], tl.int32)  # visited at most, times PACK
    before = 0
    for start in range(0, num_rows + 1, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        new, context = _lengths(p_starts, p_context, rows, num_rows, num_tokens)
        packed = _packed(rows, new, num_rows, min_tokens, below_tokens, PACK)
        tiles = tl.cdiv(packed, BLOCK_M)
        ends = before + tl.cumsum(tiles, 0)
        begins = ends - tiles
        inside = (i_tile[:, None] >= begins[None, :]) & (i_tile[:, None] < ends[None, :])
        first = (i_tile[:, None] - begins[None, :]) * BLOCK_M
        last = tl.minimum(first + BLOCK_M, packed[None, :])
        keys = ((context - new) * PACK)[None, :] + last
        b_row = tl.maximum(b_row, tl.max(tl.where(inside, rows[None, :], -1), 1))
        b_first += tl.sum(tl.where(inside, first, 0), 1)
        b_keys += tl.sum(tl.where(inside, keys, 0), 1)
        before += tl.sum(tiles, 0)

    b_rank = tl.zeros([BLOCK_T], tl.int32)
    for start in range(0, num_rows + 1, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        new, context = _lengths(p_starts, p_context, rows, num_rows, num_tokens)
        packed = _packed(rows, new, num_rows, min_tokens, below_tokens, PACK)
        tiles = tl.cdiv(packed, BLOCK_M)
        # Tiles with more keys, or as many in an earlier row: keys > bound + prefix.
        earlier = (rows[None, :] < b_row[:, None]).to(tl.int32)
        bound = b_keys[:, None] - earlier - ((context - new) * PACK)[None, :]
        whole = tiles[None, :] - 1 - tl.maximum(bound, 0) // BLOCK_M
        last = ((tiles > 0) & (packed > bound)).to(tl.int32)
        b_rank += tl.sum(tl.maximum(whole, 0) + last, 1)

    b_place = tl.where(b_row < 0, i_tile, b_rank)
    tl.store(p_tiles + b_place * 2, b_row, mask=i_tile < max_tiles)
    tl.store(p_tiles + b_place * 2 + 1, b_first, mask=i_tile < max_tiles)


@triton.jit(
    do_not_specialize=["num_rows", "min_tokens"],
    do_not_specialize_on_alignment=["p_starts", "p_context", "p_table"],
)
def _slots_kernel(
    p_starts,
    p_context,
    p_table,
    stride_table,
    p_slots,
    p_regions,
    num_rows,
    min_tokens,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    base = tl.program_id(0) * ALIGN
    row = -1
    region = 0
    length = 0
    before = 0
    for start in range(0, num_rows, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        new, context = _lengths(p_starts, p_context, rows, num_rows, 0)
        context = tl.where((new >= min_tokens) & (rows < num_rows), context, 0)
        sizes = tl.cdiv(context, ALIGN) * ALIGN
        ends = before + tl.cumsum(sizes, 0)
        begins = ends - sizes
        inside = (base >= begins) & (base < ends)
        row = tl.maximum(row, tl.max(tl.where(inside, rows, -1), 0))
        region += tl.sum(tl.where(inside, begins, 0), 0)
        length += tl.sum(tl.where(inside, context, 0), 0)
        before += tl.sum(sizes, 0)
        if base == 0:
            tl.store(p_regions + rows, begins, mask=rows < num_rows)
    positions = base - region + tl.arange(0, ALIGN)
    valid = (row >= 0) & (positions < length)
    p_row = p_table + tl.maximum(row, 0).to(tl.int64) * stride_table
    pages = tl.load(p_row + positions // PAGE, mask=valid, other=0).to(tl.int64)
    slots = tl.where(valid, pages * PAGE + positions % PAGE, -1)
    tl.store(p_slots + base + tl.arange(0, ALIGN), slots)


def make_tiles(
    query_starts: Tensor,
    context_lens: Tensor,
    num_tokens: int,
    pack: int,
    block_m: int,
    min_tokens: int = 1,
    below_tokens: int = NO_LIMIT,
    max_tiles: int | None = None,
) -> Tensor:
    """int32 [max_tiles, 2], longest first: a tile's row and its first packed query (a multiple of
    block_m); row -1 = no tile. Row N holds the packed tokens from query_starts[N] to num_tokens.

    query_starts int32 [N + 1]; context_lens int32 [N]; pack: packed queries to a token. Only rows
    of min_tokens or more and fewer than below_tokens new tokens are cut, and row N where min_tokens
    is at most 1. max_tiles: None = a bound for any lengths that sum to num_tokens."""
    num_rows = len(context_lens)
    if max_tiles is None:
        max_tiles = num_tokens * pack // block_m + num_rows + 1
    tiles = torch.empty(max_tiles, 2, dtype=torch.int32, device=query_starts.device)
    _tiles_kernel[(triton.cdiv(max_tiles, BLOCK_TILES),)](
        query_starts,
        context_lens,
        tiles,
        num_rows,
        num_tokens,
        max_tiles,
        min_tokens,
        below_tokens,
        PACK=pack,
        BLOCK_M=block_m,
        BLOCK_T=BLOCK_TILES,
        BLOCK_R=BLOCK_ROWS,
        num_warps=4,
    )
    return tiles


def make_slots(rows: Rows, min_tokens: int) -> tuple[Tensor, Tensor]:
    """(slots, regions) of a workspace that holds the context of every row of min_tokens or more new
    tokens. slots int64 [W]: the slot of a workspace row, -1 = none (fill with zeros); regions int32
    [N]: where a row's context begins, a multiple of ALIGN."""
    lengths = zip(rows.host_context_lens, rows.host_query_lens, strict=True)
    blocks = sum(triton.cdiv(context, ALIGN) for context, new in lengths if new >= min_tokens)
    device = rows.page_table.device
    slots = torch.empty(blocks * ALIGN, dtype=torch.int64, device=device)
    regions = torch.empty(len(rows.context_lens), dtype=torch.int32, device=device)
    _slots_kernel[(blocks,)](
        rows.query_starts,
        rows.context_lens,
        rows.page_table,
        rows.page_table.stride(0),
        slots,
        regions,
        len(rows.context_lens),
        min_tokens,
        PAGE=rows.page_size,
        ALIGN=ALIGN,
        BLOCK_R=BLOCK_ROWS,
        num_warps=4,
    )
    return slots, regions
