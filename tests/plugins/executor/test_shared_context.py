"""How much context a simulation's rows share, told from their tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.launch import Launch, RowSetup
from core.request import Request, SamplingParams
from plugins.cache.none import NoCache
from plugins.executor.shared_context import BLOCK, SharedContext
from plugins.executor.simulated import Simulated, SimulatedExecutor
from plugins.shared.launch_sizes import LaunchSizes
from plugins.step_time.fixed import Fixed
from tests.engine_harness import VOCAB, make_engine

GREEDY = SamplingParams(temperature=0)
SYSTEM = np.arange(2 * BLOCK, dtype=np.int32) % VOCAB


class Repeats(Fixed):
    """A second a step, and a millisecond for each token read again."""

    counts_repeats = True
    sizes = LaunchSizes()

    def seconds_of(self, kind: str, *facts: Any) -> Any:
        """By what is read again alone; an array for arrays."""
        return 1.0 + 1e-3 * facts[-1] + np.zeros(np.broadcast(*facts).shape)


def launch_of(rows: Sequence[tuple[int, np.ndarray, int]]) -> Launch:
    """New rows: their number, what they know, how much of it is cached."""
    ids, known, cached = zip(*rows, strict=True)
    lengths = np.array([len(one) for one in known], np.int32)
    first = np.array(cached, np.int32)
    return Launch(
        launch_id=0,
        row_ids=np.array(ids, np.int32),
        first_positions=first,
        num_tokens=lengths - first,
        token_ids=np.empty(0, np.int32),
        feedback=np.zeros(len(ids), np.bool_),
        samples=np.ones(len(ids), np.bool_),
        num_decode_rows=0,
        table_updates=np.empty((0, 3), np.int32),
        setups=tuple(RowSetup(row, GREEDY, len(one), one, 0, 0, ()) for row, one, _ in rows),
    )


def prompt(own: int, tokens: np.ndarray = SYSTEM) -> np.ndarray:
    """Some tokens, then others of one's own."""
    return np.concatenate((tokens, np.full(BLOCK, own, np.int32)))


def rows(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_rows_hold_what_they_found_cached_and_those_who_computed_it_too():
    shared = SharedContext(8)
    shared.note(launch_of([(0, prompt(1), 0)]))
    shared.note(launch_of([(1, prompt(2), 2 * BLOCK), (2, prompt(3), BLOCK)]))
    assert shared.repeated(rows(0)) == 0
    assert shared.repeated(rows(0, 1)) == 2 * BLOCK
    assert shared.repeated(rows(2, 1)) == BLOCK, "row 2 computed its second block itself"
    assert shared.repeated(rows(0, 1, 2)) == 3 * BLOCK


def test_rows_that_compute_the_same_tokens_share_nothing():
    shared = SharedContext(8)
    shared.note(launch_of([(0, prompt(1), 0), (1, prompt(2), 0)]))
    assert shared.repeated(rows(0, 1)) == 0
    shared.note(launch_of([(2, prompt(3), 2 * BLOCK), (3, prompt(4), 2 * BLOCK)]))
    assert shared.repeated(rows(0, 1, 2, 3)) == 2 * 2 * BLOCK


def test_the_same_tokens_behind_others_are_others():
    shared = SharedContext(8)
    other = SYSTEM[::-1].copy()
    shared.note(launch_of([(0, prompt(1), 0), (1, prompt(1, other), 3 * BLOCK)]))
    assert shared.repeated(rows(0, 1)) == 0


def test_a_row_that_begins_anew_leaves_nothing_behind():
    shared = SharedContext(8)
    shared.note(launch_of([(0, prompt(1), 0), (1, prompt(2), 2 * BLOCK)]))
    assert shared.repeated(rows(0, 1)) == 2 * BLOCK
    tiny = np.zeros(1, np.int32)
    shared.note(launch_of([(1, tiny, 0)]))
    assert shared.repeated(rows(0, 1)) == 0
    shared.note(launch_of([(0, tiny, 0)]))
    assert not shared._nodes
    assert not shared._latest


def served(until_s: float, **engine: Any) -> list[tuple[float, int]]:
    """End and number of steps of each record of requests, three of one system prompt and two of
    another, of which the second finds a part of the first's cached."""
    executor = Simulated(Repeats(), vocab_size=VOCAB, max_model_len=1024)
    run = make_engine(pages=200, budget=200, executor=executor, **engine)
    heads = [SYSTEM, SYSTEM, SYSTEM[::-1], SYSTEM, SYSTEM[::-1]]
    lengths = [9, 30, 12, 25, 40]
    pending = list(enumerate(zip(heads, lengths, strict=True)))
    records = []
    while pending or run.has_work:
        now_s = run.state.clock.now()
        while pending and pending[0][0] * 4.0 <= now_s:
            number, (head, tokens) = pending.pop(0)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            request = Request(str(number), prompt(number, head), params, forced_output=tokens)
            run.submit(request)
        event = run.step(min(until_s, pending[0][0] * 4.0 if pending else np.inf))
        records += [event.record] if event else []
    return [(record.end_s, record.steps) for record in records]


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_in_one_launch_take_what_they_take_one_by_one(overlap: bool):
    alone, joined = (served(until_s, overlap=overlap) for until_s in (0.0, np.inf))
    assert max(steps for _, steps in alone) == 1
    assert max(steps for _, steps in joined) > 4
    ends = {end_s for end_s, _ in alone}
    assert {end_s for end_s, _ in joined} <= ends
    assert joined[-1][0] == alone[-1][0]
    assert len(alone) < alone[-1][0], "some steps took longer than a second"


def test_without_a_cache_nobody_shares():
    alone = served(0.0, cache=NoCache())
    assert alone[-1][0] == pytest.approx(len(alone))


def test_pages_of_the_block_table_say_the_same(monkeypatch: pytest.MonkeyPatch):
    """An executor that is told of pages, as one on a device."""
    monkeypatch.setattr(SimulatedExecutor, "computes", True)
    table, found = np.zeros((16, 64), np.int32), []

    class Watched(SharedContext):
        def note(self, launch: Launch) -> None:
            super().note(launch)
            for setup in launch.setups:
                table[setup.row] = 0
            row, index, page = launch.table_updates.T
            table[row, index] = page
            ones = launch.row_ids[: launch.num_decode_rows]
            held = table[ones][table[ones] > 0]
            found.append((16 * (len(held) - len(set(held.tolist()))), self.repeated(ones)))

    monkeypatch.setattr("plugins.executor.simulated.SharedContext", Watched)
    served(0.0)
    assert [told for _, told in found] == [real for real, _ in found]
    assert max(real for real, _ in found) >= 2 * 2 * BLOCK


def test_what_a_new_row_of_one_token_shares_is_known_only_when_it_is_launched():
    shared = SharedContext(8)
    ones = np.ones(2, np.int32)
    assert shared.foreseen(rows(0, 1), rows(9, 9), ones, 5, 5) == 5, "nobody found anything cached"
    shared.note(launch_of([(0, prompt(1), 0), (1, prompt(2), 2 * BLOCK)]))
    ends = rows(3 * BLOCK, 3 * BLOCK)
    assert shared.foreseen(rows(0, 1), ends, ones, 5, 5) == 5
    assert shared.foreseen(rows(0, 2), ends, ones, 5, 5) == 1
    assert shared.foreseen(rows(0, 1), ends + 16, ones, 5, 5) == 1
    slices = rows(1, 64)
    assert shared.foreseen(rows(0, 2), rows(3 * BLOCK, 2 * BLOCK), slices, 5, 3) == 3
    assert shared.foreseen(rows(0, 2), rows(3 * BLOCK, 0), slices, 5, 3) == 5
