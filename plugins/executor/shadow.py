"""A shadow of the KV pool that knows what every slot holds, and checks launches against the
contract.

Each slot remembers the token and position stored in it and a digest of the whole prefix up to it,
which is what a real slot's KV depends on. Every position that a row reads must hold that row's own
prefix: a page shared wrongly, freed too early, evicted while in use or never computed shows up at
the first read."""

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from core.errors import InvariantError
from core.launch import Launch, PoolLayout, RowSetup
from plugins.executor.script import mix

Int64 = NDArray[np.int64]


class ShadowPool:
    """Raises InvariantError from `apply` for a launch that a real device would have answered
    wrongly."""

    def __init__(self, layout: PoolLayout, vocab_size: int) -> None:
        self._layout = layout
        self._vocab_size = vocab_size
        rows, max_tokens = layout.num_rows, layout.max_pages * layout.page_size
        slots = layout.num_pages * layout.page_size
        self._slot_digest = np.zeros(slots, np.uint64)
        self._slot_token = np.full(slots, -1, np.int32)
        self._slot_position = np.full(slots, -1, np.int32)
        self._table = np.zeros((rows, layout.max_pages), np.int32)
        self._tokens = np.zeros((rows, max_tokens + 1), np.int32)  # one may be known and not stored
        self._digest = np.zeros((rows, max_tokens + 1), np.uint64)
        self._known = np.zeros(rows, np.int64)
        self._on_host = np.zeros(rows, np.int64)  # known tokens that the core has been told of
        self._computed = np.zeros(rows, np.int64)
        self._live = np.zeros(rows, np.bool_)
        self._fresh = np.zeros(rows, np.bool_)  # set up and not yet launched
        self._in_flight = np.zeros(rows, np.int64)  # uncollected launches that hold the row
        self._last_launch_id: int | None = None
        self._launch_id = 0

    def apply(self, launch: Launch) -> None:
        """Check a launch, then store its tokens' KV and check everything it reads."""
        self._launch_id = launch.launch_id
        rows = launch.row_ids.astype(np.int64)
        self._check_shape(launch, rows)
        for setup in launch.setups:
            self._set_up(setup)
        self._update_table(launch.table_updates.astype(np.int64))
        first = launch.first_positions.astype(np.int64)
        ends = first + launch.num_tokens
        self._check_rows(launch, rows, first, ends)
        self._check_tokens(launch, rows, first)
        self._write(rows, first, ends)
        self._read(rows, ends)
        self._computed[rows] = ends
        self._fresh[rows] = False
        self._in_flight[rows] += 1

    def sampled(self, rows: Int64, tokens: NDArray[np.int32]) -> None:
        """Rows of the applied launch each drew a token, known to the device from now on."""
        at = self._known[rows]
        self._tokens[rows, at] = tokens
        self._digest[rows, at] = self._digest[rows, at - 1] + _term(tokens, at)
        self._known[rows] += 1

    def collected(self, rows: Int64, sampled_rows: Int64) -> None:
        """The core has a launch's tokens."""
        self._in_flight[rows] -= 1
        self._on_host[sampled_rows] += 1

    def _check_shape(self, launch: Launch, rows: Int64) -> None:
        layout, counts = self._layout, launch.num_tokens
        if self._last_launch_id is not None and launch.launch_id <= self._last_launch_id:
            self._fail("launch_id", f"above {self._last_launch_id}", launch.launch_id)
        self._last_launch_id = launch.launch_id
        if len(rows) == 0 or (counts < 1).any():
            self._fail("num_tokens", "at least one row of at least one token", counts.tolist())
        if rows.min() < 0 or rows.max() >= layout.num_rows or len(np.unique(rows)) < len(rows):
            self._fail("row_ids", f"distinct and in [0, {layout.num_rows})", rows.tolist())
        if counts.sum() > layout.max_num_batched_tokens:
            self._fail("num_tokens", f"<= {layout.max_num_batched_tokens} in all", counts.sum())
        if len(launch.token_ids) != counts.sum():
            self._fail("token_ids", f"{counts.sum()} tokens", len(launch.token_ids))
        if (counts[: launch.num_decode_rows] != 1).any():
            self._fail("num_decode_rows", "rows of one token each", launch.num_decode_rows)

    def _set_up(self, setup: RowSetup) -> None:
        row, tokens = setup.row, setup.tokens
        if self._in_flight[row]:
            self._fail("setups", "for rows without a launch in flight", f"row {row}")
        if not 1 <= setup.prompt_len <= len(tokens) <= self._tokens.shape[1]:
            self._fail("setups", f"row {row}: prompt within the known tokens", setup.prompt_len)
        self._table[row] = 0
        self._tokens[row, : len(tokens)] = tokens
        self._digest[row, : len(tokens)] = _term(tokens, np.arange(len(tokens))).cumsum()
        self._known[row] = self._on_host[row] = len(tokens)
        self._computed[row] = 0
        self._live[row] = self._fresh[row] = True

    def _update_table(self, updates: Int64) -> None:
        layout = self._layout
        rows, index, pages = updates.T
        bounds = ((rows, 0, layout.num_rows), (index, 0, layout.max_pages))
        for values, low, high in (*bounds, (pages, 1, layout.num_pages)):
            if ((values < low) | (values >= high)).any():
                self._fail("table_updates", f"in [{low}, {high})", values.tolist())
        old = self._table[rows, index]
        moved = (old != 0) & (old != pages) & (self._in_flight[rows] > 0)
        if moved.any():
            self._fail("table_updates", "no entry of a launch in flight", updates[moved].tolist())
        self._table[rows, index] = pages

    def _check_rows(self, launch: Launch, rows: Int64, first: Int64, ends: Int64) -> None:
        if not self._live[rows].all():
            self._fail("row_ids", "rows that were set up", rows[~self._live[rows]].tolist())
        gap = ~self._fresh[rows] & (first != self._computed[rows])
        if gap.any():
            expected = dict(
                zip(rows[gap].tolist(), self._computed[rows[gap]].tolist(), strict=True)
            )
            self._fail("first_positions", f"row: computed {expected}", first[gap].tolist())
        beyond = (first < 0) | (ends > self._known[rows])
        if beyond.any():
            self._fail("num_tokens", "within the known tokens", _by_row(rows, ends, beyond))
        wrong = launch.samples & (ends != self._known[rows])
        if wrong.any():
            self._fail("samples", "rows that end at their last known token", rows[wrong].tolist())
        late = ends > self._on_host[rows]
        if (late != launch.feedback).any():
            wrong = late != launch.feedback
            self._fail(
                "feedback", "exactly rows whose last token is in flight", rows[wrong].tolist()
            )

    def _check_tokens(self, launch: Launch, rows: Int64, first: Int64) -> None:
        counts = launch.num_tokens.astype(np.int64)
        row, position = rows.repeat(counts), _ranges(first, counts)
        last = counts.cumsum() - 1
        given = launch.token_ids.copy()
        given[last[launch.feedback]] = self._tokens[row, position][last[launch.feedback]]
        if ((given < 0) | (given >= self._vocab_size)).any():
            self._fail("token_ids", f"in [0, {self._vocab_size})", given.tolist())
        wrong = np.flatnonzero(given != self._tokens[row, position])
        if len(wrong):
            at = int(wrong[0])
            expected = f"{self._tokens[row, position][at]} at position {position[at]}"
            self._fail("token_ids", f"row {row[at]}: {expected}", given[at])

    def _write(self, rows: Int64, first: Int64, ends: Int64) -> None:
        row, position = rows.repeat(ends - first), _ranges(first, ends - first)
        slots = self._slots(row, position)
        distinct, counts = np.unique(slots, return_counts=True)
        if len(distinct) < len(slots):
            twice = np.isin(slots, distinct[counts > 1])
            where = list(zip(row[twice].tolist(), position[twice].tolist(), strict=True))
            self._fail("table", "one writer for each slot; (row, position)", where)
        self._slot_token[slots] = self._tokens[row, position]
        self._slot_position[slots] = position
        self._slot_digest[slots] = self._digest[row, position]

    def _read(self, rows: Int64, ends: Int64) -> None:
        row, position = rows.repeat(ends), _ranges(np.zeros_like(ends), ends)
        slots = self._slots(row, position)
        wrong = np.flatnonzero(self._slot_digest[slots] != self._digest[row, position])
        if len(wrong) == 0:
            return
        at = int(wrong[0])
        slot = int(slots[at])
        held = f"token {self._slot_token[slot]} of position {self._slot_position[slot]}"
        if self._slot_token[slot] == self._tokens[row, position][at]:
            held += " after another prefix"
        page, offset = divmod(slot, self._layout.page_size)
        rule = f"token {self._tokens[row, position][at]} of position {position[at]}"
        self._fail(f"row {row[at]} reads page {page} offset {offset}", rule, held)

    def _slots(self, row: Int64, position: Int64) -> Int64:
        pages = self._table[row, position // self._layout.page_size].astype(np.int64)
        if (pages == 0).any():
            at = int(np.flatnonzero(pages == 0)[0])
            self._fail(
                "table", "a page for every position", f"row {row[at]} position {position[at]}"
            )
        return pages * self._layout.page_size + position % self._layout.page_size

    def _fail(self, field: str, rule: str, value: Any) -> NoReturn:
        raise InvariantError(f"launch {self._launch_id}: {field} must be {rule}; got {value}")


def _term(tokens: NDArray[np.int32], positions: Int64) -> NDArray[np.uint64]:
    """A summand for each (token, position); a prefix's digest is their sum."""
    return mix((positions.astype(np.uint64) << np.uint64(32)) + tokens.astype(np.uint64) + _SALT)


def _ranges(first: Int64, counts: Int64) -> Int64:
    """first[i] .. first[i] + counts[i] - 1 for every i, in one array."""
    before = counts.cumsum() - counts
    return np.arange(int(counts.sum())) + (first - before).repeat(counts)


def _by_row(rows: Int64, values: Int64, where: NDArray[np.bool_]) -> dict[int, int]:
    return dict(zip(rows[where].tolist(), values[where].tolist(), strict=True))


_SALT = np.uint64(1)  # so that token 0 at position 0 is not the fixed point 0 of mix
