"""Finds decode rows that share their first pages, on the device: four launches a step.

Rows whose block tables name the same physical pages read the same keys and values (a node of a
radix tree, SGLang, arXiv:2312.07104). Each row looks at a few depths, spaced geometrically, and
takes the one where most is saved: pages times the other rows that have the same page there. Rows
that chose the same page at the same depth are a group, and its prefix is what they all share: their
tables are compared page by page from the first, so that a group is right for any table. Only a
row's own whole pages count, and its last token is never in a prefix, so that every row keeps
something to attend to by itself.

A group's rows are packed into tiles, and its prefix is cut into splits of a common length, the one
that fills the card in the shortest time. Sharing costs a launch and partial results in every layer,
so nothing is shared where too little is saved."""

from dataclasses import dataclass
from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.split_plan import block_of_rows

PREFIX_ITEM_FIELDS = 8
"""int32 words of an item: its first place in the order of rows, its rows, first position, end
position, which split of the prefix it is, and three unused."""

MIN_SPLIT_TOKENS = 256
MAX_PARTIALS = 2048
MIN_PARTS, MAX_PARTS = 4, 16
"""Partial results of prefixes that a batch has room for, shared evenly by its rows; a row has at
least MIN_PARTS and at most MAX_PARTS."""

MAX_DEPTHS = 32
"""Of a row that are looked at: all in a narrow table; in one of up to 1,000 times the shortest
prefix, each at most a quarter deeper than the one before."""
NUM_CANDIDATES = tl.constexpr(16)
ITEM_OVERHEAD_TILES = tl.constexpr(2.0)
"""What an item costs besides its tiles: finding its rows, and writing their partial results."""

MIN_SPARED = tl.constexpr(4)
"""A group's rows but one must be spared this many times the shortest prefix in all: its items cost
as much whether it has two rows or fills a tile."""

RANK, MEMBERS, TOKENS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """What the planner knows of the kernel that attends to prefixes.

    num_kv_heads: programs to an item. block_n: tokens of a tile. tile_rows: decode rows of a tile.
    resident: programs that the card holds at once. min_tokens: shorter prefixes are left to the
    rows. min_saved_tokens: nothing is shared unless the batch reads that many fewer by it."""

    num_kv_heads: int
    block_n: int
    tile_rows: int
    resident: int
    min_tokens: int
    min_saved_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTable:
    """A step's groups, on the device.

    order int32 [N]: rows, those of a group side by side. groups int32 [3, N], in that order: a
    row's rank in its group, the group's rows, tokens that they share if that is long enough. lens,
    parts int32 [N]: tokens of a row's prefix and its splits, 0 where it attends alone. items
    int32 [max_items, PREFIX_ITEM_FIELDS], of which the first num_items (int32 [1]) are valid.
    max_parts bounds parts."""

    order: Tensor
    groups: Tensor
    lens: Tensor
    parts: Tensor
    items: Tensor
    num_items: Tensor
    max_parts: int

    def read(self) -> dict[str, int | list[int] | list[list[int]]]:
        """num_items, and for every group its rows, prefix tokens and splits. Waits for the
        device."""
        order, (ranks, members, _) = self.order.tolist(), self.groups.tolist()
        lens, parts = self.lens.tolist(), self.parts.tolist()
        firsts = [at for at, row in enumerate(order) if ranks[at] == 0 and lens[row] > 0]
        return {
            "num_items": int(self.num_items),
            "rows": [order[at : at + members[at]] for at in firsts],
            "prefix_tokens": [lens[order[at]] for at in firsts],
            "splits": [parts[order[at]] for at in firsts],
        }


def may_share(num_rows: int, longest: int, shape: PrefixShape) -> bool:
    """Whether rows of at most `longest` tokens could save enough, from what the host knows."""
    enough = (num_rows - 1) * longest >= shape.min_saved_tokens
    return num_rows > 1 and longest > shape.min_tokens and enough


def group_rows(page_table: Tensor, lens: Tensor, page_size: int, shape: PrefixShape) -> PrefixTable:
    """Groups of the rows of page_table int32 [N, max_pages] with lens int32 [N] tokens."""
    num_rows, max_pages = page_table.shape
    stride = page_table.stride(0)
    least = max(1, triton.cdiv(shape.min_tokens, page_size))
    num_depths = triton.next_power_of_2(min(MAX_DEPTHS, max(2, max_pages - least + 1)))
    step = log2(max(max_pages, least) / least) / (num_depths - 1)
    depths = (least, step, max_pages)
    block = block_of_rows(num_rows)
    counts, leaders = _columns(lens, 2, num_rows * num_depths)
    keys, runs, order = _columns(lens, 3, num_rows)
    groups = lens.new_empty(3, num_rows)
    _match_kernel[(triton.cdiv(num_rows, 16), num_depths)](
        *(page_table, lens, counts, leaders, num_rows, stride, *depths),
        PAGE_SIZE=page_size,
        NUM_DEPTHS=num_depths,
        BLOCK_R=16,
        BLOCK_B=block,
        num_warps=4,
    )
    _choose_kernel[(num_rows,)](
        *(page_table, lens, counts, leaders, keys, runs, stride, *depths),
        PAGE_SIZE=page_size,
        NUM_DEPTHS=num_depths,
        BLOCK_P=min(1024, triton.next_power_of_2(max_pages)),
        num_warps=4,
    )
    _group_kernel[(num_rows,)](
        *(keys, runs, order, groups, num_rows, shape.min_tokens),
        PAGE_SIZE=page_size,
        BLOCK_B=block,
        num_warps=4,
    )
    return _cut(order, groups, shape, block)


def _cut(order: Tensor, groups: Tensor, shape: PrefixShape, block: int) -> PrefixTable:
    num_rows = len(order)
    max_parts = min(MAX_PARTS, max(MIN_PARTS, MAX_PARTIALS // num_rows))
    lens, parts = _columns(order, 2, num_rows)
    items = order.new_empty(num_rows * max_parts, PREFIX_ITEM_FIELDS)
    num_items = order.new_empty(1, dtype=torch.int32)
    _cut_kernel[(num_rows,)](
        *(order, groups, lens, parts, items, num_items),
        *(num_rows, shape.min_saved_tokens, max_parts),
        NUM_KV_HEADS=shape.num_kv_heads,
        RESIDENT=shape.resident,
        TILE_ROWS=shape.tile_rows,
        BLOCK_N=shape.block_n,
        MIN_TILES=triton.cdiv(MIN_SPLIT_TOKENS, shape.block_n),
        BLOCK_S=MAX_PARTS,
        BLOCK_B=block,
        num_warps=4,
    )
    return PrefixTable(order, groups, lens, parts, items, num_items, max_parts)


def _columns(like: Tensor, count: int, length: int) -> tuple[Tensor, ...]:
    """New tensors [length] of like's type, each aligned to 16 bytes, in one allocation."""
    pitch = -(-length // 4) * 4
    return tuple(like.new_empty(count, pitch)[:, :length])


@triton.jit
def _depth(i, least, step, max_pages):
    """Pages of the i-th candidate depth."""
    pages = (least * tl.exp2(i.to(tl.float32) * step) + 0.001).to(tl.int32)
    return tl.minimum(pages, max_pages)


@triton.jit
def _page_at(p_table, p_lens, row, valid, depth, stride_row, absent, PAGE_SIZE: tl.constexpr):
    """Rows' pages at an index; absent where it is none of a row's own whole pages."""
    length = tl.load(p_lens + row, mask=valid, other=0)
    own = valid & (tl.maximum(length - 1, 0) // PAGE_SIZE > depth)
    return tl.load(p_table + row.to(tl.int64) * stride_row + depth, mask=own, other=absent)


@triton.jit(do_not_specialize=["num_rows", "stride_row", "least", "step", "max_pages"])
def _match_kernel(
    p_table, p_lens, p_counts, p_leaders, num_rows, stride_row, least, step, max_pages,
    PAGE_SIZE: tl.constexpr, NUM_DEPTHS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """For each row and candidate depth: rows with the same page there, and the first of them."""
    i_depth = tl.program_id(1)
    depth = _depth(i_depth, least, step, max_pages) - 1
    i_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_r = i_r < num_rows
    b_page = _page_at(p_table, p_lens, i_r, in_r, depth, stride_row, -1, PAGE_SIZE)
    b_count = tl.zeros([BLOCK_R], tl.int32)
    b_leader = i_r
    for start in range(0, num_rows, BLOCK_B):
        i_b = start + tl.arange(0, BLOCK_B)
        b_other = _page_at(p_table, p_lens, i_b, i_b < num_rows, depth, stride_row, -2, PAGE_SIZE)
        same = b_page[:, None] == b_other[None, :]
        b_count += tl.sum(same.to(tl.int32), 1)
        b_leader = tl.minimum(b_leader, tl.min(tl.where(same, i_b[None, :], num_rows), 1))
    tl.store(p_counts + i_r * NUM_DEPTHS + i_depth, b_count, mask=in_r)
    tl.store(p_leaders + i_r * NUM_DEPTHS + i_depth, b_leader, mask=in_r)


@triton.jit(do_not_specialize=["stride_row", "least", "step", "max_pages"])
def _choose_kernel(
    p_table, p_lens, p_counts, p_leaders, p_keys, p_runs, stride_row, least, step, max_pages,
    PAGE_SIZE: tl.constexpr, NUM_DEPTHS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A row's depth and leader, as a key, and how many pages it shares with the leader in all."""
    row = tl.program_id(0)
    i_c = tl.arange(0, NUM_DEPTHS)
    b_count = tl.load(p_counts + row * NUM_DEPTHS + i_c)
    b_pages = _depth(i_c, least, step, max_pages)
    b_saved = b_pages.to(tl.float32) * (b_count - 1).to(tl.float32)
    best = tl.max(b_saved, 0)
    chosen = tl.min(tl.where(b_saved == best, i_c, NUM_DEPTHS - 1), 0)
    leader = tl.load(p_leaders + row * NUM_DEPTHS + chosen)
    leader = tl.where(best > 0, leader, row)
    own = tl.maximum(tl.load(p_lens + row) - 1, 0) // PAGE_SIZE
    limit = tl.minimum(own, tl.maximum(tl.load(p_lens + leader) - 1, 0) // PAGE_SIZE)

    p_mine = p_table + row.to(tl.int64) * stride_row
    p_other = p_table + leader.to(tl.int64) * stride_row
    i_p = tl.arange(0, BLOCK_P)
    run = limit
    start = tl.where(leader == row, limit, 0)  # a leader need not be compared with itself
    while start < limit:
        valid = start + i_p < limit
        b_mine = tl.load(p_mine + start + i_p, mask=valid, other=0)
        b_other = tl.load(p_other + start + i_p, mask=valid, other=0)
        run = tl.min(tl.where(b_mine != b_other, start + i_p, limit), 0)
        start = tl.where(run < limit, limit, start + BLOCK_P)
    tl.store(p_keys + row, leader * NUM_DEPTHS + tl.where(best > 0, chosen, 0))
    tl.store(p_runs + row, tl.where(best > 0, run, 0))


@triton.jit(do_not_specialize=["num_rows", "min_tokens"])
def _group_kernel(
    p_keys, p_runs, p_order, p_groups, num_rows, min_tokens,
    PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A row's place in the order and its group: the rows with its key."""
    row = tl.program_id(0)
    key = tl.load(p_keys + row)
    run = tl.load(p_runs + row)
    before = tl.zeros([], tl.int32)
    rank = tl.zeros([], tl.int32)
    members = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        i_b = start + tl.arange(0, BLOCK_B)
        b_key = tl.load(p_keys + i_b, mask=i_b < num_rows, other=0x7FFFFFFF)
        b_run = tl.load(p_runs + i_b, mask=i_b < num_rows, other=0)
        same = b_key == key
        before += tl.sum((b_key < key).to(tl.int32), 0)
        rank += tl.sum((same & (i_b < row)).to(tl.int32), 0)
        members += tl.sum(same.to(tl.int32), 0)
        run = tl.minimum(run, tl.min(tl.where(same, b_run, 0x7FFFFFFF), 0))
    tokens = run * PAGE_SIZE
    spared = (members - 1) * tokens
    worth = (tokens >= min_tokens) & (spared >= min_tokens * MIN_SPARED)
    place = before + rank
    tl.store(p_order + place, row)
    tl.store(p_groups + num_rows * RANK + place, rank)
    tl.store(p_groups + num_rows * MEMBERS + place, members)
    tl.store(p_groups + num_rows * TOKENS + place, tl.where(worth, tokens, 0))


@triton.jit
def _step(tiles, length, max_parts):
    """Tiles of the splits of prefixes, made even: at most `length`, if max_parts allow it."""
    splits = tl.minimum(tl.cdiv(tiles, length), max_parts)
    return tl.maximum(tl.cdiv(tiles, tl.maximum(splits, 1)), 1)


@triton.jit(do_not_specialize=["num_rows", "min_saved", "max_parts"])
def _cut_kernel(
    p_order, p_groups, p_lens, p_parts, p_items, p_num_items, num_rows, min_saved, max_parts,
    NUM_KV_HEADS: tl.constexpr, RESIDENT: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Every program repeats the search for the length of splits, then writes the row in its place
    and, where a tile of rows begins there, the tile's items. A group's items are in the order of
    splits, so that its tiles read the same keys at the same time."""
    place = tl.program_id(0)
    saved = tl.zeros([], tl.float32)
    work = tl.zeros([], tl.float32)
    longest = tl.full([], 1, tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        i_b = start + tl.arange(0, BLOCK_B)
        valid = i_b < num_rows
        b_rank = tl.load(p_groups + num_rows * RANK + i_b, mask=valid, other=0)
        b_tokens = tl.load(p_groups + num_rows * TOKENS + i_b, mask=valid, other=0)
        b_tiles = tl.cdiv(b_tokens, BLOCK_N)
        saved += tl.sum(tl.where(b_rank > 0, b_tokens, 0).to(tl.float32), 0)
        work += tl.sum(tl.where(b_rank % TILE_ROWS == 0, b_tiles, 0).to(tl.float32), 0)
        longest = tl.maximum(longest, tl.max(b_tiles, 0))
    # Candidates grow by 2^(1/4) from the length that would just fill the card without a remainder.
    i_c = tl.arange(0, NUM_CANDIDATES)
    least = tl.maximum(tl.ceil(work * NUM_KV_HEADS / RESIDENT), MIN_TILES * 1.0)
    b_length = (least * tl.exp2(i_c.to(tl.float32) / 4.0) + 0.5).to(tl.int32)
    b_items = tl.zeros([NUM_CANDIDATES], tl.int32)
    b_most = tl.zeros([NUM_CANDIDATES], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        i_b = start + tl.arange(0, BLOCK_B)
        valid = i_b < num_rows
        b_rank = tl.load(p_groups + num_rows * RANK + i_b, mask=valid, other=1)
        b_tokens = tl.load(p_groups + num_rows * TOKENS + i_b, mask=valid, other=0)
        b_tiles = tl.where(b_rank % TILE_ROWS == 0, tl.cdiv(b_tokens, BLOCK_N), 0)[None, :]
        b_step = _step(b_tiles, b_length[:, None], max_parts)
        b_items += tl.sum(tl.cdiv(b_tiles, b_step), 1)
        b_most = tl.maximum(b_most, tl.max(tl.where(b_tiles > 0, b_step, 0), 1))
    b_rounds = tl.cdiv(b_items * NUM_KV_HEADS, RESIDENT).to(tl.float32)
    b_cost = b_rounds * (b_most.to(tl.float32) + ITEM_OVERHEAD_TILES)
    least_cost = tl.min(b_cost, 0)
    length = tl.min(tl.where(b_cost == least_cost, b_length, 0x7FFFFFFF), 0)
    shares = saved >= min_saved

    row = tl.load(p_order + place)
    rank = tl.load(p_groups + num_rows * RANK + place)
    members = tl.load(p_groups + num_rows * MEMBERS + place)
    tokens = tl.where(shares, tl.load(p_groups + num_rows * TOKENS + place), 0)
    tiles = tl.cdiv(tokens, BLOCK_N)
    step = _step(tiles, length, max_parts)
    splits = tl.cdiv(tiles, step)
    tl.store(p_lens + row, tokens)
    tl.store(p_parts + row, splits)

    base = tl.zeros([], tl.int32)
    first = place - rank
    for start in range(0, first, BLOCK_B):
        i_b = start + tl.arange(0, BLOCK_B)
        valid = i_b < first
        b_rank = tl.load(p_groups + num_rows * RANK + i_b, mask=valid, other=1)
        b_tokens = tl.load(p_groups + num_rows * TOKENS + i_b, mask=valid, other=0)
        b_tiles = tl.where(b_rank % TILE_ROWS == 0, tl.cdiv(b_tokens, BLOCK_N), 0)
        base += tl.sum(tl.where(valid, tl.cdiv(b_tiles, _step(b_tiles, length, max_parts)), 0), 0)
    base = tl.where(shares, base, 0)
    row_tiles = tl.cdiv(members, TILE_ROWS)
    if place == num_rows - 1:
        tl.store(p_num_items, base + splits * row_tiles)
    i_s = tl.arange(0, BLOCK_S)
    begins = rank % TILE_ROWS == 0
    valid = (i_s < splits) & begins
    p_item = p_items + (base + i_s * row_tiles + rank // TILE_ROWS) * 8
    tl.store(p_item, place + i_s * 0, mask=valid)
    tl.store(p_item + 1, tl.minimum(members - rank, TILE_ROWS) + i_s * 0, mask=valid)
    tl.store(p_item + 2, i_s * step * BLOCK_N, mask=valid)
    tl.store(p_item + 3, tl.minimum((i_s + 1) * step * BLOCK_N, tokens), mask=valid)
    tl.store(p_item + 4, i_s, mask=valid)
