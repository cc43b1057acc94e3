"""Steps to be timed: which ones, as launches for an executor, and how long each takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, RowSetup
from core.protocols import Executor
from core.request import SamplingParams

Int32 = NDArray[np.int32]
FIRST_ID = -(10**9)  # of launches that no engine counts
GREEDY = SamplingParams(temperature=0.0)
LEAST_SHARERS = 4
"""Rows of a step in which some share a prefix."""
SEVERAL, LEAST_OF_SEVERAL = 8, 64
"""Chunks of a step, and tokens of each, for which the grid has steps with several."""


@dataclass(frozen=True, slots=True)
class Point:
    """rows: of one token each, reading `context` tokens, their own included. chunk: tokens of each
    of num_chunks further rows, 0 = there is none, behind `past` tokens of its own. Of the first,
    `sharers` at a time begin with the same `shared` tokens, in the same pages."""

    rows: int
    context: int
    chunk: int = 0
    past: int = 0
    shared: int = 0
    sharers: int = 1
    num_chunks: int = 1

    @property
    def further(self) -> int:
        """Rows with a chunk."""
        return self.num_chunks * (self.chunk > 0)

    @property
    def prefixes(self) -> int:
        """How many the rows begin with, if they share any."""
        return -(-self.rows // self.sharers)

    @property
    def repeated(self) -> int:
        """Context tokens of rows that one before holds in the same pages."""
        return self.shared * (self.rows - self.prefixes)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.rows + self.further

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return self.rows + self.further * self.chunk

    @property
    def kv_tokens(self) -> int:
        """Context tokens read, new ones included."""
        return self.rows * self.context + self.further * (self.past + self.chunk)

    @property
    def attended(self) -> int:
        """Pairs of a new token and one that it attends to."""
        own = self.chunk * self.past + self.chunk * (self.chunk + 1) // 2
        return self.rows * self.context + self.further * own

    def facts(self, took: "Timed") -> tuple[int, int, int, int, int, float, int, int, int]:
        """Of a step that took so long, as calibrate_fit.steps_of takes them."""
        longest = self.past + self.chunk if self.chunk else 0
        counts = self.rows, self.num_rows, self.num_tokens, self.kv_tokens, self.attended
        pairs = self.further * self.chunk * longest
        return (*counts, took.seconds, longest, pairs, self.repeated)

    def lengths(self) -> list[int]:
        """Tokens of each row after the step."""
        return [self.context] * self.rows + [self.past + self.chunk] * self.further


@dataclass(frozen=True, slots=True)
class Room:
    """What a step must fit: an engine's limits."""

    max_rows: int
    max_tokens: int
    max_len: int
    num_pages: int
    page_size: int

    def pages(self, point: Point) -> list[int]:
        """Pages of each row."""
        return [-(-length // self.page_size) for length in point.lengths()]

    def holds(self, point: Point) -> bool:
        """Whether the step can be made."""
        fits = point.num_rows <= self.max_rows and point.num_tokens <= self.max_tokens
        whole = max(point.lengths()) <= self.max_len and point.shared % self.page_size == 0
        pages = sum(self.pages(point)) - point.repeated // self.page_size
        return fits and whole and pages <= self.num_pages


@dataclass(frozen=True, slots=True)
class Timed:
    """A step's seconds, and those in which the host started it, None = not known."""

    seconds: float
    launch_s: float | None


def grid(
    rows: Sequence[int],
    contexts: Sequence[int],
    chunks: Sequence[int],
    prefixes: Sequence[int] = (),
) -> list[Point]:
    """Every number of rows with every context; every chunk behind nothing and behind every context;
    every number of rows beside every chunk, contexts taking turns; and every chunk as several short
    ones, alone or beside rows in turn. Every prefix with every number of rows that may share it,
    and every other beside one of the shorter chunks: they go on for a quarter of it, and all, two
    or eight have it in common, in turn."""
    decodes = [Point(count, context) for count, context in product(rows, contexts)]
    alone = [Point(0, 0, chunk, past) for chunk, past in product(chunks, (0, *contexts))]
    mixed = [
        Point(count, contexts[(i + j) % len(contexts)], chunk, contexts[j % len(contexts)])
        for (i, count), (j, chunk) in product(enumerate(rows), enumerate(chunks))
    ]
    parts = [chunk // SEVERAL for chunk in chunks if chunk // SEVERAL >= LEAST_OF_SEVERAL]
    for j, part in enumerate(parts):
        count, context = rows[j % len(rows)] * (j % 2), contexts[j % len(contexts)] * (j % 2)
        past = contexts[(j + 1) % len(contexts)] * (j % 3 > 0)
        mixed.append(Point(count, context, part, past, num_chunks=SEVERAL))
    several = [count for count in rows if count >= LEAST_SHARERS]
    short = chunks[: (len(chunks) + 1) // 2]
    shared = []
    for (i, count), (j, prefix) in product(enumerate(several), enumerate(prefixes)):
        common = prefix, min(count, (count, 2, 8)[(i + j) % 3])
        shared.append(Point(count, prefix + prefix // 4, 0, 0, *common))
        if i % 2:
            chunk = short[(i // 2 + j) % len(short)]
            shared.append(Point(count, prefix + prefix // 4, chunk, prefix, *common))
    return [*decodes, *alone, *mixed, *shared]


def time_point(
    executor: Executor,
    point: Point,
    room: Room,
    rng: np.random.Generator,
    warmup: int,
    repeats: int,
) -> Timed:
    """Medians of one launch's end to the next's, two in flight, and of a launch's start, after
    `warmup` of them."""
    ends: list[float] = []
    starts_s: list[float] = []
    steps = launches(point, room, rng, 1 + warmup + repeats)
    executor.launch(next(steps))
    for launch in steps:
        since = perf_counter()
        executor.launch(launch)
        starts_s.append(perf_counter() - since)
        ends.append(executor.collect().finished_s)
    ends.append(executor.collect().finished_s)
    medians = (float(np.median(one[warmup:])) for one in (np.diff(ends), starts_s))
    return Timed(*medians)


def launches(point: Point, room: Room, rng: np.random.Generator, num: int) -> Iterator[Launch]:
    """The same step `num` times over pages of its own, the first of the pool, as an engine hands
    them out, in random order: the first sets the rows up, all compute the same positions again.
    Every row samples."""
    lengths = np.array(point.lengths(), np.int32)
    counts = np.ones_like(lengths)
    counts[point.rows :] = point.chunk
    setups = tuple(
        RowSetup(row, GREEDY, length, _known(point, row, length), row, 0, ())
        for row, length in enumerate(lengths.tolist())
    )
    table = _table(point, room, rng)
    for number in range(num):
        yield Launch(
            launch_id=FIRST_ID + number,
            row_ids=np.arange(len(lengths), dtype=np.int32),
            first_positions=lengths - counts,
            num_tokens=counts,
            token_ids=np.ones(point.num_tokens, np.int32),
            feedback=np.zeros(len(lengths), np.bool_),
            samples=np.ones(len(lengths), np.bool_),
            num_decode_rows=point.rows,
            table_updates=table if number == 0 else table[:0],
            setups=setups if number == 0 else (),
        )


def _known(point: Point, row: int, length: int) -> Int32:
    """A row's tokens, as different from other rows' as its pages are."""
    known = np.full(length, 1 + row, np.int32)
    if row < point.rows:
        known[: point.shared] = 1 + row % point.prefixes
    return known


def _table(point: Point, room: Room, rng: np.random.Generator) -> Int32:
    """(row, page index, page id) of every page; ids from 1 on, no two the same but of prefixes,
    which rows have in turn."""
    pages = room.pages(point)
    rows = np.repeat(np.arange(len(pages)), pages)
    indices = np.concatenate([np.arange(count) for count in pages])
    own = np.arange(len(rows))
    common = (indices < point.shared // room.page_size) & (rows < point.rows)
    firsts = np.concatenate(([0], np.add.accumulate(pages)))
    own[common] = firsts[rows[common] % point.prefixes] + indices[common]
    held, which = np.unique(own, return_inverse=True)
    ids = 1 + rng.permutation(len(held))[which]
    return np.stack([rows, indices, ids], axis=1).astype(np.int32)
