"""Aborts in every state of a request, with and without launches in flight."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from core.engine import Engine
from core.request import Sequence
from core.table import State
from plugins.batching.chunked import Chunked
from plugins.batching.prefill_first import PrefillFirst
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import summarise
from tests.engine_harness import (
    Arrival,
    Outcome,
    check_alive,
    check_ended_once,
    check_idle,
    check_streams,
    finish,
    make_engine,
    run,
)

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@dataclass(frozen=True)
class Look:
    """Where request B stands between two steps."""

    engine: Engine
    sequence: Sequence

    def __getattr__(self, name: str) -> int:
        return int(self.engine.state.table.columns[name][self.sequence.slot])

    @property
    def is_launched(self) -> bool:
        return any(self.sequence.id in entry.ids for entry in self.engine._in_flight)

    @property
    def is_chunking(self) -> bool:
        return self.state == State.RUNNING and 0 < self.computed < self.prompt


# 12 pages and two slots; A runs first, B shares a prefix with it and has 6 chunks of 16. A late
# token of a preempted row is committed in the step that preempts: no state of its own.
STATES: dict[str, tuple[bool, Callable[[Look], bool]]] = {  # needs overlap, predicate
    "waiting": (False, lambda b: b.state == State.WAITING and b.preemptions == 0),
    "between chunks": (False, lambda b: b.is_chunking and b.computed >= 48),
    "in a launched chunk": (True, lambda b: b.is_chunking and b.is_launched),
    "first token in flight": (True, lambda b: b.in_flight == 1 and b.known == b.prompt),
    "decoding": (False, lambda b: b.state == State.RUNNING and b.known > b.prompt + 2),
    "decoding in flight": (True, lambda b: b.in_flight == 1 and b.known > b.prompt),
    "preempted": (False, lambda b: b.state == State.WAITING and b.preemptions > 0),
    "resumed": (False, lambda b: b.state == State.RUNNING and b.preemptions > 0),
    "last token in flight": (True, lambda b: b.state == State.DRAINING),
}


@pytest.mark.parametrize("cache", [Radix, NoCache])
@pytest.mark.parametrize(
    ("name", "overlap"), [(n, o) for n, (needs, _) in STATES.items() for o in {True, needs}]
)
def test_abort_in_state(name, overlap, cache):
    """A05, and the list in which other systems leaked."""
    holds = STATES[name][1]
    slots = 1 if name == "waiting" else 2
    engine = make_engine(pages=12, seqs=slots, budget=16, overlap=overlap, cache=cache())
    arrivals = [Arrival(0, "A", 40, 60), Arrival(0, "B", 90, 40, ("A", 32))]
    requests = {arrival.name: arrival.request() for arrival in arrivals}
    for request in requests.values():
        engine.submit(request)
    events = []
    for _ in range(400):
        live = engine.state.live.get("B")
        if live and holds(Look(engine, live.sequences[0])):
            break
        events.append(engine.step())
    else:
        raise AssertionError(f"B never was {name}")
    engine.abort("B")
    engine.abort("B")
    before = len(engine.records["B"].choices[0].times_s)
    events += finish(engine)
    outcome = Outcome(engine, requests, [event for event in events if event is not None])
    check_ended_once(outcome.events, engine)
    check_streams(outcome)
    assert outcome.reason("B") == "abort"
    assert len(outcome.tokens("B")) == before, "no token after the abort"
    assert outcome.reason("A") == "length"
    check_idle(engine)
    check_alive(engine)


@OVERLAP
def test_abort_in_the_middle_of_a_chunked_prefill_gives_its_pages_back(overlap):
    """A01."""
    engine = make_engine(pages=32, budget=32, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 320, 4)], aborts={"A": 3})
    assert out.reason("A") == "abort"
    assert out.tokens("A") == []
    assert 64 <= out.records["A"].computed_tokens <= 128


@OVERLAP
def test_abort_of_a_waiting_request_leaves_no_lock_on_its_match(overlap):
    """A03."""
    engine = make_engine(pages=32, seqs=1, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 64, 50), Arrival(1, "B", 70, 4, ("A", 64))], aborts={"B": 3})
    assert out.reason("B") == "abort"
    memory = engine.state.memory
    kept = memory.cache.num_pages
    assert kept > 0
    assert len(memory.cache.evict(kept)) == kept


@OVERLAP
def test_abort_after_the_end_twice_and_of_an_unknown_id_does_nothing(overlap):
    """A06."""
    engine = make_engine(overlap=overlap)
    run(engine, [Arrival(0, "A", 10, 3)])
    for name in ("A", "A", "nope"):
        engine.abort(name)
        finish(engine)
    assert engine.records["A"].finish_reason == "length"
    assert engine.state.finish_counts == {"length": 1}
    check_alive(engine)


def test_abort_takes_the_exact_id_only():
    engine = make_engine()
    out = run(engine, [Arrival(0, "req-1", 10, 5), Arrival(0, "req-10", 10, 5)], {"req-1": 2})
    assert [out.reason("req-1"), out.reason("req-10")] == ["abort", "length"]


def test_abort_before_the_first_step_ends_the_request_without_a_launch():
    engine = make_engine()
    engine.submit(Arrival(0, "A", 10, 5).request())
    engine.abort("A")
    (event,) = finish(engine)
    assert [record.finish_reason for record in event.finished] == ["abort"]
    assert engine.executor.num_launches == 0
    check_alive(engine)


def test_abort_that_comes_before_its_request_is_forgotten():
    """The caller of submit and abort keeps their order; an early abort is of an unknown id."""
    engine = make_engine()
    engine.abort("A")
    engine.submit(Arrival(0, "A", 10, 5).request())
    finish(engine)
    assert engine.records["A"].finish_reason == "length"


def test_id_of_an_aborted_request_may_be_used_again_while_its_launch_is_in_flight():
    engine = make_engine(overlap=True)
    engine.submit(Arrival(0, "A", 10, 30).request())
    for _ in range(5):
        engine.step()
    engine.abort("A")
    engine.step()
    again = Arrival(0, "A", 10, 4).request()
    engine.submit(again)
    finish(engine)
    assert engine.records["A"].finish_reason == "length"
    assert len(engine.records["A"].choices[0].token_ids) == 4
    check_idle(engine)


@pytest.mark.parametrize(
    ("batching", "overlap"),
    [(Chunked(slice_tokens=32), False), (Chunked(slice_tokens=32), True), (PrefillFirst(), True)],
)
def test_random_aborts_leak_nothing(batching, overlap):
    """A05: 200 random rounds, over the three makes."""
    rng = np.random.default_rng(3)
    engine = make_engine(pages=12, seqs=4, budget=32, overlap=overlap, batching=batching)
    arrivals, aborts = [], {}
    for index in range(70):
        at, length = 2 * index, int(rng.integers(1, 100))
        params = {"n": int(rng.integers(1, 3))}
        arrivals.append(Arrival(at, f"r{index}", length, 12, ("base", length // 2), params))
        aborts[f"r{index}"] = at + int(rng.integers(0, 40))
    out = run(engine, arrivals, aborts)
    reasons = {record.finish_reason for record in out.records.values()}
    assert reasons == {"abort", "length"}
    check_alive(engine)


@OVERLAP
def test_every_accepted_request_is_in_exactly_one_reason(overlap):
    """Q03: totals and per-request numbers agree."""
    engine = make_engine(pages=32, overlap=overlap)
    arrivals = [Arrival(0, f"r{i}", 40, 30) for i in range(8)] + [Arrival(0, "big", 600, 4)]
    out = run(engine, arrivals, {f"r{i}": 4 + i for i in range(5)})
    totals = StepTotals(16, 32)
    for event in out.events:
        totals.add(event.record)
    summary = summarise(out.records.values(), totals)
    reasons = summary["requests"]["finish_reasons"]
    assert {reason: count for reason, count in reasons.items() if count} == {
        "abort": 5,
        "length": 3,
        "capacity": 1,
    }
    assert sum(reasons.values()) == summary["requests"]["accepted"] == 9
    assert engine.state.finish_counts == {"abort": 5, "length": 3, "capacity": 1}
    assert out.total("sampled_tokens") == sum(r.output_tokens for r in out.records.values())
    computed = out.total("prefill_tokens") + out.total("decode_tokens")
    assert computed == sum(record.computed_tokens for record in out.records.values())


@pytest.mark.parametrize(("overlap", "num_requests"), [(False, 100), (True, 40)])
def test_recomputing_after_a_preemption_is_never_a_cache_hit(overlap, num_requests):
    """Q05."""
    engine = make_engine(pages=12, seqs=6, overlap=overlap, strict=False)
    rng = np.random.default_rng(1)
    arrivals = [Arrival(i, f"r{i}", int(rng.integers(10, 50)), 18) for i in range(num_requests)]
    out = run(engine, arrivals)
    assert out.preemptions() > num_requests // 10
    assert sum(record.cached_tokens for record in out.records.values()) == 0
    assert out.total("recomputed_tokens") > 0
    recomputed = sum(record.recomputed_tokens for record in out.records.values())
    assert out.total("recomputed_tokens") == recomputed
    assert sum(record.resumed_cached_tokens for record in out.records.values()) > 0
