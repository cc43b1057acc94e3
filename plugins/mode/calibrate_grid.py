"""Steps to be timed: which ones, as launches for an executor, and how long each takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, RowSetup
from core.protocols import Executor
from core.request import SamplingParams

Int32 = NDArray[np.int32]
FIRST_ID = -(10**9)  # of launches that no engine counts
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Point:
    """rows: of one token each, reading `context` tokens, their own included. chunk: tokens of one
    further row, 0 = there is none, behind `past` tokens of its own."""

    rows: int
    context: int
    chunk: int = 0
    past: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.rows + (self.chunk > 0)

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return self.rows + self.chunk

    @property
    def kv_tokens(self) -> int:
        """Context tokens read, new ones included."""
        return self.rows * self.context + (self.past + self.chunk if self.chunk else 0)

    @property
    def attended(self) -> int:
        """Pairs of a new token and one that it attends to."""
        own = self.chunk * self.past + self.chunk * (self.chunk + 1) // 2
        return self.rows * self.context + own

    def facts(self, seconds: float) -> tuple[int, int, int, int, int, float, int, int]:
        """Of a step that took so long, as calibrate_fit.steps_of takes them."""
        longest = self.past + self.chunk if self.chunk else 0
        counts = self.rows, self.num_rows, self.num_tokens, self.kv_tokens, self.attended
        return (*counts, seconds, longest, self.chunk * longest)

    def lengths(self) -> list[int]:
        """Tokens of each row after the step."""
        return [self.context] * self.rows + [self.past + self.chunk] * (self.chunk > 0)


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
        short = max(point.lengths()) <= self.max_len
        return fits and short and sum(self.pages(point)) <= self.num_pages


def grid(rows: Sequence[int], contexts: Sequence[int], chunks: Sequence[int]) -> list[Point]:
    """Every number of rows with every context; every chunk behind nothing and behind every context;
    every number of rows beside every chunk, contexts taking turns."""
    decodes = [Point(count, context) for count, context in product(rows, contexts)]
    alone = [Point(0, 0, chunk, past) for chunk, past in product(chunks, (0, *contexts))]
    mixed = [
        Point(count, contexts[(i + j) % len(contexts)], chunk, contexts[j % len(contexts)])
        for (i, count), (j, chunk) in product(enumerate(rows), enumerate(chunks))
    ]
    return [*decodes, *alone, *mixed]


def time_point(
    executor: Executor,
    point: Point,
    room: Room,
    rng: np.random.Generator,
    warmup: int,
    repeats: int,
) -> float:
    """Median seconds from one launch's end to the next's, two in flight, after `warmup` of them."""
    ends: list[float] = []
    steps = launches(point, room, rng, 1 + warmup + repeats)
    executor.launch(next(steps))
    for launch in steps:
        executor.launch(launch)
        ends.append(executor.collect().finished_s)
    ends.append(executor.collect().finished_s)
    return float(np.median(np.diff(ends)[warmup:]))


def launches(point: Point, room: Room, rng: np.random.Generator, num: int) -> Iterator[Launch]:
    """The same step `num` times over pages of its own, in random order: the first sets the rows
    up, all compute the same positions again. Every row samples."""
    lengths = np.array(point.lengths(), np.int32)
    counts = np.ones_like(lengths)
    if point.chunk:
        counts[-1] = point.chunk
    known = np.ones(int(lengths.max()), np.int32)
    setups = tuple(
        RowSetup(row, GREEDY, length, known[:length], row, 0, ())
        for row, length in enumerate(lengths.tolist())
    )
    table = _table(room.pages(point), room.num_pages, rng)
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


def _table(pages: list[int], num_pages: int, rng: np.random.Generator) -> Int32:
    """(row, page index, page id) of every page; ids 1 .. num_pages, no two the same."""
    rows = np.repeat(np.arange(len(pages)), pages)
    indices = np.concatenate([np.arange(count) for count in pages])
    ids = 1 + rng.permutation(num_pages)[: len(rows)]
    return np.stack([rows, indices, ids], axis=1).astype(np.int32)
