"""Cuts a decode batch's contexts into splits, on the device: one launch a step for all layers.

The result is a table of work items, one for each (row, split). How long a split is comes from the
lengths on the device, so a captured CUDA graph stays right while they grow; the host only bounds
the number of items. Every program of the planning kernel repeats the search for the common split
length, which costs nothing on idle multiprocessors, and writes its own rows.

Cost model of `balanced`, in tiles read while the card is full: all work, shared by the programs
that it holds at once (`resident`); a fixed overhead for each round of programs; where the last is
less than half full, its programs run at twice the speed but leave bandwidth unused; and half of
that for an item longer than the mean, which may start late. The first rule of FlashDecoding and
FlashInfer (arXiv:2501.01005), a length that just fills the card, follows where one round is
enough."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.check import require

ITEM_FIELDS = 8
"""int32 words of an item: row, first position, end position, its partial result, the row's first
partial result and number of them, how many of these are splits, and one unused."""

BLOCKS_OF_ROWS = (32, 128, 256)
"""Rows whose lengths a program looks at together: the first that holds all, else the last. Few
sizes, for each is compiled by itself."""

MAX_ROUNDS = 4
"""Rounds of split items that a large batch may have beside its rows."""

MAX_SPLITS = 1024
"""Of a row, where their number is fixed: each leaves a partial result."""

NUM_CANDIDATES = tl.constexpr(16)
BALANCED = tl.constexpr(0)
FIXED_LENGTH = tl.constexpr(1)
FIXED_COUNT = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What a planner knows of the kernel that will run its items.

    num_kv_heads: programs to an item. block_n: tokens of a tile. resident: programs that the card
    holds at once."""

    num_kv_heads: int
    block_n: int
    resident: int

    def is_small(self, num_rows: int) -> bool:
        """Whether rows in one split each would leave half the card idle."""
        return 2 * num_rows * self.num_kv_heads <= self.resident


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Launch parameters. rows: that a program plans, a power of two up to 16. num_warps: of a
    program."""

    rows: int
    num_warps: int


@dataclass(frozen=True, slots=True, eq=False)
class Contexts:
    """What the splits are cut from, on the device but for the bounds.

    lens int32 [N], none above longest. window: only that many latest positions are seen, None =
    all. Where rows share a prefix that another kernel attends to: prefix_lens int32 [N], positions
    to leave out at the front, and prefix_parts int32 [N], at most max_prefix_parts: partial results
    to leave room for."""

    lens: Tensor
    longest: int
    window: int | None = None
    prefix_lens: Tensor | None = None
    prefix_parts: Tensor | None = None
    max_prefix_parts: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """A step's work, on the device.

    items int32 [max_items, ITEM_FIELDS], of which the first num_items (int32 [1]) are valid.
    row_parts int32 [N, 3]: a row's first partial result, its number of splits, whose partial
    results come first, and its number of partial results. arrivals int32 [N, num_kv_heads]:
    zeros between launches. max_parts bounds the partial results."""

    items: Tensor
    num_items: Tensor
    row_parts: Tensor
    arrivals: Tensor
    max_parts: int

    @property
    def max_items(self) -> int:
        """The bound that the host knows: programs are launched for that many."""
        return self.items.shape[0]

    def read(self) -> dict[str, int | list[int]]:
        """num_items, and for each row its number of splits and the tokens of its longest. Waits for
        the device."""
        items = self.items[: int(self.num_items)].tolist()
        splits = [0] * self.row_parts.shape[0]
        longest = list(splits)
        for row, begin, end, *_ in items:
            splits[row] += 1
            longest[row] = max(longest[row], end - begin)
        return {"num_items": len(items), "splits": splits, "split_tokens": longest}


def balanced(
    contexts: Contexts,
    shape: PlanShape,
    overhead_tiles: float = 1.0,
    config: PlannerConfig | None = None,
) -> SplitTable:
    """Splits of a length that fills the card and ends evenly. The default planner.

    overhead_tiles: an item's fixed cost, in tiles read meanwhile. A batch that leaves half the card
    idle gets one full round of items at most, a larger one a few rounds beside its rows."""
    num_rows, round_items = len(contexts.lens), triton.cdiv(shape.resident, shape.num_kv_heads)
    limit = (
        max(num_rows, round_items)
        if shape.is_small(num_rows)
        else num_rows + MAX_ROUNDS * round_items
    )
    return _plan(contexts, shape, limit, BALANCED.value, overhead_tiles, config)


def fixed_length(contexts: Contexts, shape: PlanShape, split_tokens: int = 512) -> SplitTable:
    """Splits end at multiples of `split_tokens`, whatever else is in the batch: a row's result is
    then the same bit for bit in any batch."""
    rule = f"a positive multiple of the tile ({shape.block_n})"
    holds = split_tokens > 0 and split_tokens % shape.block_n == 0
    require(holds, "split_tokens", rule, split_tokens)
    longest = contexts.longest
    if contexts.window is not None:  # it may straddle one edge more than its length implies
        longest = min(longest, contexts.window + split_tokens - 1)
    limit = len(contexts.lens) * max(1, triton.cdiv(longest, split_tokens))
    return _plan(contexts, shape, limit, FIXED_LENGTH.value, split_tokens)


def fixed_count(contexts: Contexts, shape: PlanShape, splits: int = 1) -> SplitTable:
    """Every row in `splits` splits, up to MAX_SPLITS (1 = a single pass), some of them empty where
    a row is short."""
    require(1 <= splits <= MAX_SPLITS, "splits", f"in 1 .. {MAX_SPLITS}", splits)
    return _plan(contexts, shape, len(contexts.lens) * splits, FIXED_COUNT.value, splits)


@triton.jit
def _row_splits(first, end, length, MODE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Splits of rows that see positions first .. end: length is in tiles, in tokens or a count."""
    if MODE == BALANCED:
        splits = tl.cdiv(tl.cdiv(end - first, BLOCK_N), length)
    elif MODE == FIXED_LENGTH:
        splits = tl.cdiv(end, length) - first // length
    else:
        splits = end * 0 + length
    return tl.maximum(splits, 1)


@triton.jit
def _seen(p_lens, p_prefix_lens, row, valid, window, HAS_PREFIX: tl.constexpr):
    """First and end position that rows attend to themselves."""
    end = tl.load(p_lens + row, mask=valid, other=0)
    first = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    if HAS_PREFIX:
        first = tl.maximum(first, tl.load(p_prefix_lens + row, mask=valid, other=0))
    return first, end


@triton.jit
def _sum_and_max(a_sum, a_most, b_sum, b_most):
    return a_sum + b_sum, tl.maximum(a_most, b_most)


@triton.jit
def _balanced_length(
    p_lens, p_prefix_lens, num_rows, max_items, window, overhead, SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, HAS_PREFIX: tl.constexpr,
):  # fmt: skip
    """Tiles of a split. SHARE: of a round of programs, that an item takes."""
    i_b = tl.arange(0, BLOCK_B)
    b_work = tl.zeros([BLOCK_B], tl.float32)
    b_most = tl.full([BLOCK_B], 1.0, tl.float32)
    for start in range(0, num_rows, BLOCK_B):
        valid = start + i_b < num_rows
        b_first, b_end = _seen(p_lens, p_prefix_lens, start + i_b, valid, window, HAS_PREFIX)
        b_tiles = tl.cdiv(b_end - b_first, BLOCK_N).to(tl.float32)
        b_work += b_tiles
        b_most = tl.maximum(b_most, b_tiles)
    work, longest = tl.reduce((b_work, b_most), 0, _sum_and_max)
    # Candidates grow by 2^(1/4) from the least that may fit; the last is no split at all.
    i_c = tl.arange(0, NUM_CANDIDATES)
    least = tl.maximum(tl.ceil(work / max_items), 2.0)
    b_length = tl.floor(least * tl.exp2(i_c.to(tl.float32) / 4.0) + 0.5)
    b_length = tl.where(i_c == NUM_CANDIDATES - 1, longest, b_length)
    b_inverse = 1.0 / b_length
    b_cuts = tl.zeros([BLOCK_B, NUM_CANDIDATES], tl.float32)
    for start in range(0, num_rows, BLOCK_B):
        valid = start + i_b < num_rows
        b_first, b_end = _seen(p_lens, p_prefix_lens, start + i_b, valid, window, HAS_PREFIX)
        # Half a tile less lies far from any whole number of splits: rounding cannot matter.
        b_tiles = tl.maximum(tl.cdiv(b_end - b_first, BLOCK_N), 1).to(tl.float32) - 0.5
        b_tiles = tl.where(valid, b_tiles, 0.0)
        b_cuts += tl.ceil(b_tiles[:, None] * b_inverse[None, :])
    b_items = tl.sum(b_cuts, 0)
    b_rounds = b_items * SHARE
    b_last = b_rounds - tl.ceil(b_rounds) + 1.0  # how full the last round is
    b_longest = longest / tl.ceil(longest / b_length)  # a row is cut evenly
    cost = tl.maximum(0.5 - b_last, 0.0) * b_longest
    cost += 0.25 * tl.maximum(b_longest - work / b_items, 0.0)
    cost += work * SHARE + tl.ceil(b_rounds) * overhead
    cost = tl.where(b_items <= max_items, cost, float("inf"))
    best = tl.argmin(cost, 0)
    return tl.sum(tl.where(i_c == best, b_length, 0.0), 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "max_items", "window"])
def _plan_kernel(
    p_lens,
    p_prefix_lens,
    p_prefix_parts,
    p_items,
    p_num_items,
    p_row_parts,
    p_arrivals,
    num_rows,
    max_items,
    window,  # 0 = none
    parameter,  # overhead in tiles (a float), tokens of a split, or a count
    MODE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program i writes rows i * ROWS .. (i + 1) * ROWS and their items."""
    BLOCK_S: tl.constexpr = 64 // ROWS
    length = parameter
    if MODE == BALANCED:
        length = _balanced_length(
            p_lens, p_prefix_lens, num_rows, max_items, window, parameter,
            NUM_KV_HEADS / RESIDENT, BLOCK_N, BLOCK_B, HAS_PREFIX,
        )  # fmt: skip
    i_b = tl.arange(0, BLOCK_B)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_before = tl.zeros([BLOCK_B, ROWS], tl.int32)
    b_parts_before = tl.zeros([BLOCK_B, ROWS], tl.int32)
    for start in range(0, tl.minimum(tl.program_id(0) * ROWS + ROWS, num_rows), BLOCK_B):
        valid = start + i_b < num_rows
        b_first, b_end = _seen(p_lens, p_prefix_lens, start + i_b, valid, window, HAS_PREFIX)
        b_splits = _row_splits(b_first, b_end, length, MODE, BLOCK_N)
        b_parts = b_splits
        if HAS_PREFIX:
            b_parts += tl.load(p_prefix_parts + start + i_b, mask=valid, other=0)
        earlier = (start + i_b)[:, None] < rows[None, :]
        b_before += tl.where(earlier, b_splits[:, None], 0)
        b_parts_before += tl.where(earlier, b_parts[:, None], 0)
    before, parts_before = tl.sum(b_before, 0), tl.sum(b_parts_before, 0)
    valid = rows < num_rows
    first, end = _seen(p_lens, p_prefix_lens, rows, valid, window, HAS_PREFIX)
    splits = tl.where(valid, _row_splits(first, end, length, MODE, BLOCK_N), 0)
    num_parts = splits
    if HAS_PREFIX:
        num_parts += tl.load(p_prefix_parts + rows, mask=valid, other=0)
    tl.store(p_row_parts + rows * 3, parts_before, mask=valid)
    tl.store(p_row_parts + rows * 3 + 1, splits, mask=valid)
    tl.store(p_row_parts + rows * 3 + 2, num_parts, mask=valid)
    tl.store(p_num_items + rows * 0, before + splits, mask=rows == num_rows - 1)
    i_h = tl.arange(0, BLOCK_HEADS)
    p_arrival = p_arrivals + rows[:, None] * NUM_KV_HEADS + i_h[None, :]
    tl.store(p_arrival, 0, mask=valid[:, None] & (i_h < NUM_KV_HEADS)[None, :])
    if MODE == FIXED_LENGTH:
        origin = first // length * length
        step = tl.zeros([ROWS], tl.int32) + length
    else:
        origin = first
        step = tl.cdiv(tl.cdiv(end - first, BLOCK_N), tl.maximum(splits, 1)) * BLOCK_N
    for start in range(0, tl.max(splits, 0), BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)[None, :]
        used = split < splits[:, None]
        none = split * 0
        b_begin = origin[:, None] + split * step[:, None]
        b_end = tl.minimum(b_begin + step[:, None], end[:, None])
        b_begin = tl.minimum(tl.maximum(b_begin, first[:, None]), end[:, None])
        p_item = p_items + (before[:, None] + split) * 8
        tl.store(p_item, rows[:, None] + none, mask=used)
        tl.store(p_item + 1, b_begin, mask=used)
        tl.store(p_item + 2, b_end, mask=used)
        tl.store(p_item + 3, parts_before[:, None] + split, mask=used)
        tl.store(p_item + 4, parts_before[:, None] + none, mask=used)
        tl.store(p_item + 5, num_parts[:, None] + none, mask=used)
        tl.store(p_item + 6, splits[:, None] + none, mask=used)


def block_of_rows(num_rows: int) -> int:
    """The one of BLOCKS_OF_ROWS for a batch."""
    return next((block for block in BLOCKS_OF_ROWS if num_rows <= block), BLOCKS_OF_ROWS[-1])


def default_config(num_rows: int) -> PlannerConfig:
    """A program a row, but at most one to a multiprocessor of a small card: each repeats the
    search."""
    rows = triton.next_power_of_2(triton.cdiv(num_rows, 128))
    return PlannerConfig(rows=min(rows, 16), num_warps=4 if num_rows > 32 else 1)


def _plan(
    contexts: Contexts,
    shape: PlanShape,
    limit: int,
    mode: int,
    parameter: float,
    config: PlannerConfig | None = None,
) -> SplitTable:
    lens = contexts.lens
    num_rows = len(lens)
    shared = contexts.prefix_lens is not None
    items = lens.new_empty(limit, ITEM_FIELDS)
    num_items = lens.new_empty(1)
    row_parts = lens.new_empty(num_rows, 3)
    arrivals = lens.new_empty(num_rows, shape.num_kv_heads)
    config = config or default_config(num_rows)
    _plan_kernel[(triton.cdiv(num_rows, config.rows),)](
        lens,
        contexts.prefix_lens if shared else lens,
        contexts.prefix_parts if shared else lens,
        items,
        num_items,
        row_parts,
        arrivals,
        num_rows,
        limit,
        contexts.window or 0,
        parameter,
        MODE=mode,
        NUM_KV_HEADS=shape.num_kv_heads,
        RESIDENT=shape.resident,
        BLOCK_N=shape.block_n,
        BLOCK_B=block_of_rows(num_rows),
        BLOCK_HEADS=triton.next_power_of_2(shape.num_kv_heads),
        HAS_PREFIX=shared,
        ROWS=config.rows,
        num_warps=config.num_warps,
    )
    max_parts = limit + num_rows * contexts.max_prefix_parts
    return SplitTable(items, num_items, row_parts, arrivals, max_parts)
