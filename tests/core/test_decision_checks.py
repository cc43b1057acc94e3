"""Decisions that the core refuses: the error names plugin, hook, rule and value, and the books stay
in balance."""

import re

import numpy as np
import pytest

from core.engine import MAX_IDLE_STEPS
from core.errors import InvariantError, PolicyError
from core.invariants import check_invariants
from core.queries import (
    AdmissionDecision,
    BatchDecision,
    Cause,
    Hold,
    OrderDecision,
    PreemptionDecision,
    Verdict,
)
from plugins.allocator.paged import PagedAllocator
from tests.core.hook_spies import spy
from tests.engine_harness import Arrival, check_idle, finish, make_engine

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
TWO = [Arrival(0, "A", 40, 20), Arrival(0, "B", 40, 20)]


def refused(plugins, arrivals=TWO, error=PolicyError, steps=100, **kwargs):
    """The message of the error that a bad plugin causes. Then all requests are aborted: everything
    must come back."""
    engine = make_engine(plugins=plugins, **kwargs)
    for arrival in arrivals:
        engine.submit(arrival.request())
    with pytest.raises(error) as caught:
        step_times(engine, steps)
    check_invariants(engine.state, [entry.ids for entry in engine._in_flight])
    for name in list(engine.records):
        engine.abort(name)
    finish(engine)
    check_idle(engine)
    return str(caught.value)


def step_times(engine, steps):
    for _ in range(steps):
        engine.step()


LENGTH = "ids, num_tokens must be of one length >= 1, got "
RUNNING = "ids must be running requests, got "
BATCHES = {
    "empty": (lambda ids: ([], []), LENGTH + "(0,), (0,)"),
    "lengths": (lambda ids: (ids, [1]), LENGTH + "(2,), (1,)"),
    "shape": (lambda ids: (ids[:, None], [[1], [1]]), LENGTH + "(2, 1), (2, 1)"),
    "unknown": (lambda ids: ([77 << 20], [1]), RUNNING + f"[{77 << 20}]"),
    "beyond": (lambda ids: ([(1 << 20) - 1], [1]), RUNNING + f"[{(1 << 20) - 1}]"),
    "negative": (lambda ids: ([-1], [1]), RUNNING + "[-1]"),
    "slots": (lambda ids: (ids & 0xFFFFF, [1, 1]), RUNNING + "[0, 1]"),
    "twice": (lambda ids: (ids[[0, 0]], [1, 1]), "ids must be distinct, got ["),
    "zero": (lambda ids: (ids, [1, 0]), "num_tokens must be in [1, remaining = 40], got 0"),
    "below": (lambda ids: (ids, [-3, 1]), "num_tokens must be in [1, remaining = 40], got -3"),
    "above": (lambda ids: (ids[:1], [41]), "num_tokens must be in [1, remaining = 40], got 41"),
    "sum": (
        lambda ids: (ids, [40, 25]),
        "num_tokens must sum to <= engine.max_num_batched_tokens = 64, got 65",
    ),
}


@OVERLAP
@pytest.mark.parametrize("name", BATCHES)
def test_bad_batch_is_refused(name, overlap):
    choose, text = BATCHES[name]
    bad = spy("decide_batch", lambda query: BatchDecision(*choose(query.running.id)))
    message = refused({"mine": bad}, overlap=overlap)
    assert message.startswith(f"decide_batch of mine: {text}")


def test_batch_with_a_waiting_request_is_refused():
    seen = []
    order = spy("decide_order", lambda q: seen.extend(q.waiting.id.tolist()))
    bad = spy("decide_batch", lambda query: BatchDecision([seen[1]], [1]))
    message = refused({"looks": order, "mine": bad}, seqs=1)
    assert message.startswith(f"decide_batch of mine: {RUNNING}")


def test_batch_that_grows_bad_in_the_middle_of_a_run_is_refused():
    """Decoding rows have one token to compute, and two with a launch in flight would be a lie."""

    def choose(query):
        num = np.ones(len(query.running), np.int32) if query.step else query.running.remaining
        return BatchDecision(query.running.id, num + (query.step == 5))

    message = refused({"mine": spy("decide_batch", choose)}, overlap=True, budget=128)
    assert message.endswith("num_tokens must be in [1, remaining = 1], got 2")


def victims(choose):
    """A preemption policy by its answer to PAGES."""
    return spy("decide_preemption", lambda q: PreemptionDecision(choose(q)))


MUST = "decide_preemption of mine: victims must "
VICTIMS = {
    "unknown": (lambda q: [77 << 20], MUST + rf"be ids of candidates, got \[{77 << 20}\]"),
    "mixed": (lambda q: [*q.candidates.id, 5], MUST + r"be ids of candidates, got \[5\]"),
    "shape": (lambda q: q.candidates.id[:, None], MUST + "be ids of candidates"),
    "twice": (lambda q: q.candidates.id[[1, 1]], MUST + r"be distinct, got \[\d+, \d+\]"),
    "none": (lambda q: [], MUST + "free the 1 pages that are short, got 0 victims and 1 pages"),
}


@OVERLAP
@pytest.mark.parametrize("name", VICTIMS)
def test_bad_victims_for_pages_are_refused(name, overlap):
    choose, text = VICTIMS[name]
    arrivals = [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)]
    message = refused({"mine": victims(choose)}, arrivals, pages=9, overlap=overlap)
    assert re.match(text, message)


def test_victims_that_free_too_little_are_refused():
    """Three full pages, three rows that need one more: one victim frees one of the two."""
    admit = spy("decide_admission", lambda q: AdmissionDecision(Verdict.ADMIT))
    arrivals = [Arrival(0, name, 16, 20) for name in "ABC"]
    plugins = {"mine": victims(lambda q: q.candidates.id[:1]), "admits": admit}
    message = refused(plugins, arrivals, pages=3)
    assert (
        message == MUST + "free the 3 pages that are short, got 1 victims and 1 pages still short"
    )


def test_preempting_all_candidates_keeps_one_running():
    engine = make_engine(pages=9, plugins={"mine": victims(lambda q: q.candidates.id)})
    for arrival in [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)]:
        engine.submit(arrival.request())
    events = finish(engine)
    preempting = [e.record for e in events if any(c.kind == "preempted" for c in e.record.choices)]
    assert preempting
    assert all(record.num_rows == 1 for record in preempting)
    assert {record.finish_reason for record in engine.records.values()} == {"length"}


def test_no_answer_when_pages_are_short_is_an_error():
    arrivals = [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)]
    silent = spy("decide_preemption")
    message = refused({"mine": silent}, arrivals, pages=9, preemption=None)
    assert message == "no plugin answers decide_preemption when pages are short"
    assert silent.asked[-1].cause is Cause.PAGES


def test_bad_victims_for_a_beneficiary_are_refused():
    bad = spy("decide_preemption", lambda q: PreemptionDecision(q.beneficiary.id), displaces=True)
    message = refused({"mine": bad}, seqs=1)
    assert message.startswith(MUST + "be ids of candidates")


ORDERS = {
    "short": (lambda n: np.zeros(n - 1), "keys must be [2] or [2, k], got shape (1, 1)"),
    "long": (lambda n: np.zeros((n + 1, 2)), "keys must be [2] or [2, k], got shape (3, 2)"),
    "deep": (lambda n: np.zeros((n, 1, 1)), "keys must be [2] or [2, k], got shape (2, 1, 1)"),
    "nan": (lambda n: np.array([0.0, np.nan]), "keys must be finite, got nan"),
    "inf": (lambda n: np.array([[0.0, 1.0], [0.0, np.inf]]), "keys must be finite, got inf"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_bad_order_is_refused(name):
    keys, text = ORDERS[name]
    bad = spy("decide_order", lambda query: OrderDecision(keys(len(query.waiting))))
    assert refused({"mine": bad}) == f"decide_order of mine: {text}"


@pytest.mark.parametrize("hold", ["always", None, float("nan")])
def test_bad_hold_is_refused(hold):
    bad = spy("decide_order", lambda q: OrderDecision(q.waiting.arrival_s, hold))
    message = refused({"mine": bad})
    assert (
        message == f"decide_order of mine: hold must be a Hold or a time in seconds, got {hold!r}"
    )


@pytest.mark.parametrize("hold", [Hold.ALWAYS, Hold.STEP, 0.5, float("inf")])
def test_every_kind_of_hold_is_taken(hold):
    good = spy("decide_order", lambda q: OrderDecision(q.waiting.arrival_s, hold))
    engine = make_engine(plugins={"mine": good})
    engine.submit(TWO[0].request())
    finish(engine)
    assert engine.records["A"].finish_reason == "length"


@pytest.mark.parametrize("verdict", [True, "admit", None])
def test_bad_verdict_is_refused(verdict):
    bad = spy("decide_admission", lambda q: AdmissionDecision(verdict))
    message = refused({"mine": bad})
    assert message == f"decide_admission of mine: verdict must be a Verdict, got {verdict!r}"


@pytest.mark.parametrize(
    ("role", "hook"),
    [
        ("order", "decide_order"),
        ("admission", "decide_admission"),
        ("batching", "decide_batch"),
        ("cache_admission", "decide_cache_admission"),
    ],
)
def test_no_answer_at_a_hook_that_needs_one_is_an_error(role, hook):
    assert refused({"mine": spy(hook)}, **{role: None}) == f"no plugin answers {hook}"


@pytest.mark.parametrize("verdict", [Verdict.WAIT, Verdict.SKIP])
def test_policy_that_admits_nobody_is_named(verdict):
    nobody = spy("decide_admission", lambda q: AdmissionDecision(verdict, "not today"))
    message = refused({"mine": nobody}, steps=MAX_IDLE_STEPS)
    last = "A" if verdict is Verdict.WAIT else "B"
    assert message == (
        f"nothing runs and nobody was admitted in {MAX_IDLE_STEPS} steps;"
        f" mine on '{last}': not today"
    )


def test_policy_that_admits_late_is_let_be():
    late = spy(
        "decide_admission",
        lambda q: AdmissionDecision(
            Verdict.ADMIT if q.step >= MAX_IDLE_STEPS - 1 else Verdict.WAIT, "later"
        ),
    )
    engine = make_engine(plugins={"mine": late})
    engine.submit(TWO[0].request())
    finish(engine)
    assert engine.records["A"].finish_reason == "length"


class BadAllocator(PagedAllocator):
    """Hands out what `pages` says."""

    def __init__(self, pages):
        super().__init__(16, 16)
        self.pages = pages

    def allocate(self, num_pages):
        return np.array(self.pages[:num_pages], np.int32)


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ([0, 1, 2], "pages that are not FREE: 0 (RESERVED, 0 users)"),
        ([1, 17, 2], "pages that are not FREE: 17 (no such page)"),
        ([1, -3, 2], "pages that are not FREE: -3 (no such page)"),
        ([4, 5, 4], "a page twice: [4, 4, 5]"),
    ],
)
def test_allocator_that_hands_out_bad_pages_is_named(pages, text):
    engine = make_engine(plugins={"mine": spy("build_allocator", lambda q: BadAllocator(pages))})
    engine.submit(TWO[0].request())
    with pytest.raises(InvariantError) as caught:
        engine.step()
    assert str(caught.value) == f"allocator BadAllocator handed out {text}"
    assert engine.state.memory.ledger.num_free == 16
    assert engine.state.memory.ledger.refs.sum() == 0
