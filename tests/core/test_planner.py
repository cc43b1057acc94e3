"""Planning under pressure: what gives way, in which order, and no more than needed."""

import numpy as np
import pytest

from core.planner import Rows
from core.queries import AdmissionDecision, BatchDecision, PreemptionDecision, Verdict
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.contiguous import Contiguous
from plugins.batching.chunked import Chunked
from plugins.batching.prefill_first import PrefillFirst
from plugins.cache.none import NoCache
from plugins.order.priority import Priority
from plugins.preemption.priority import PreemptLowestPriority
from tests.core.hook_spies import spy
from tests.engine_harness import Arrival, finish, make_engine, run, sequence_of

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def admit_all():
    return spy("decide_admission", lambda query: AdmissionDecision(Verdict.ADMIT, "come in"))


def kinds(event):
    return [(choice.request_id, choice.kind) for choice in event.record.choices]


@OVERLAP
def test_admission_whose_pages_are_short_is_taken_back_before_anyone_is_preempted(overlap):
    engine = make_engine(pages=4, plugins={"mine": admit_all()}, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 40, 10), Arrival(2, "B", 33, 4)])
    taken_back = out.choices("unadmitted", "B")
    assert taken_back
    assert {(c.plugin, c.reason) for c in taken_back} == {("core", "no page for its first tokens")}
    assert out.preemptions() == 0
    assert out.records["B"].preemptions == 0
    assert [choice.request_id for choice in out.choices("admitted")] == ["A", "B"]
    assert out.first_token_step("B") > out.last_token_step("A")


def test_admissions_are_taken_back_last_first_and_only_as_far_as_needed():
    engine = make_engine(pages=8, budget=256, plugins={"mine": admit_all()})
    out = run(engine, [Arrival(0, name, 40, 8) for name in "ABC"])
    assert kinds(out.events[0]) == [("C", "unadmitted"), ("A", "admitted"), ("B", "admitted")]
    assert out.preemptions() == 0


@OVERLAP
def test_nothing_waiting_is_admitted_in_a_step_that_preempts_for_pages(overlap):
    engine = make_engine(pages=9, overlap=overlap, plugins={"mine": admit_all()})
    arrivals = [Arrival(i, f"r{i}", 20, 40) for i in range(8)]
    out = run(engine, arrivals)
    preempting = [set(dict(kinds(e)).values()) for e in out.events if "preempted" in str(kinds(e))]
    assert preempting
    assert not any({"admitted", "resumed"} & found for found in preempting)


def test_displacement_admits_its_beneficiary_alone():
    policies = {"order_mine": Priority(), "victims": PreemptLowestPriority()}
    engine = make_engine(pages=64, seqs=3, plugins=policies)
    low = [Arrival(0, f"L{i}", 8, 30, fields={"priority": 5}) for i in range(4)]
    out = run(engine, [*low, Arrival(2, "U", 8, 3, fields={"priority": 0})])
    (event,) = [e for e in out.events if "preempted" in dict(kinds(e)).values()]
    assert kinds(event) == [("U", "refused"), ("L2", "preempted"), ("U", "admitted")]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("urgent_tokens", [300, 390])
def test_displacement_goes_on_until_admission_agrees(contiguous, urgent_tokens):
    """Freeing what the prompt needs is not enough if admission wants a margin (or a whole run):
    victims must not be preempted for nothing, step after step."""
    policies = {"order_mine": Priority(), "victims": PreemptLowestPriority()}
    memory = {"allocator": Contiguous(16), "cache": NoCache()} if contiguous else {}
    engine = make_engine(pages=128, seqs=32, budget=512, plugins=policies, **memory)
    low = [Arrival(0, f"L{i}", 200, 200, fields={"priority": 5}) for i in range(8)]
    out = run(engine, [*low, Arrival(6, "U", urgent_tokens, 20, fields={"priority": 0})])
    displaced = [e for e in out.events if "beneficiary" in str(e.record.choices)]
    assert len(displaced) == 1
    assert ("U", "admitted") in kinds(displaced[0])
    assert displaced[0].record.step <= 7


def test_ranking_every_candidate_preempts_no_more_than_needed():
    """Three rows at a page boundary, one page short: one of them goes."""
    rank_all = spy("decide_preemption", lambda q: PreemptionDecision(q.candidates.id[::-1]))
    plugins = {"mine": rank_all, "admits": admit_all()}
    engine = make_engine(pages=8, budget=256, plugins=plugins)
    out = run(engine, [Arrival(0, name, 31, 20) for name in "ABC"])
    first = next(e for e in out.events if "preempted" in dict(kinds(e)).values())
    assert rank_all.asked[0].pages_short == 1
    assert kinds(first) == [("C", "preempted")]


def planned(pages=8, lengths=(32, 32)):
    """A and B run and their prompts are computed; with two pages each, 4 of 8 pages are free."""
    gate = PromptFits(growth_share=0.0)
    engine = make_engine(pages=pages, budget=256, cache=NoCache(), admission=gate)
    for name, length in zip("AB", lengths, strict=True):
        engine.submit(Arrival(0, name, length, 40).request())
    engine.step()
    assert engine.state.memory.supply == pages - sum(-(-length // 16) for length in lengths)
    return engine, np.array([sequence_of(engine, name).slot for name in "AB"])


@pytest.mark.parametrize(
    ("wanted", "granted"),
    [
        ([16, 16], [16, 16]),  # a page each
        ([64, 1], [64]),  # A takes all four pages
        ([100, 1], [64]),  # and is cut to what they hold
        ([40, 40], [40, 16]),  # three pages and one
        ([50, 16], [50]),  # four and none
    ],
)
def test_trimming_serves_leading_rows_and_cuts_the_first_that_does_not_fit(wanted, granted):
    engine, slots = planned()
    rows = engine._planner._trim(Rows(slots, np.array(wanted, np.int32)))
    assert rows.num_tokens.tolist() == granted
    assert rows.slots.tolist() == slots[: len(granted)].tolist()
    engine.state.memory.grow(rows.slots, rows.num_tokens)
    finish(engine)


def test_trimming_keeps_a_row_that_needs_no_page_behind_one_that_finds_none():
    engine, slots = planned(pages=5, lengths=(32, 33))
    rows = engine._planner._trim(Rows(slots, np.array([1, 1], np.int32)))
    assert rows.slots.tolist() == [slots[1]]
    assert rows.num_tokens.tolist() == [1]


def test_new_choice_that_does_not_fit_either_is_cut_before_more_are_preempted():
    def choose(query):
        ids = query.running.id
        if query.step == 0:
            return BatchDecision(ids, [16, 16, 16])
        if query.step == 1:
            return BatchDecision(ids[:1], query.running.remaining[:1] if query.replanning else [64])
        return None

    plugins = {"mine": spy("decide_batch", choose), "admits": admit_all()}
    engine = make_engine(pages=6, budget=128, cache=NoCache(), plugins=plugins)
    out = run(engine, [Arrival(0, n, p, 4) for n, p in [("A", 90), ("B", 20), ("C", 20)]])
    assert kinds(out.events[1]) == [("C", "preempted")]
    assert out.events[1].record.rows == [("A", 0, 64)], "five pages for A, one for B"


@OVERLAP
def test_core_refuses_an_admission_that_finds_no_run_of_pages(overlap):
    """The policy said yes, but the free pages are in pieces."""
    engine = make_engine(
        pages=64,
        page_size=1,
        overlap=overlap,
        cache=NoCache(),
        allocator=Contiguous(1),
        plugins={"mine": admit_all()},
    )
    arrivals = [Arrival(0, f"r{i}", 10, 3 if i % 2 else 30) for i in range(3)]
    out = run(engine, [*arrivals, Arrival(1, "wide", 20, 10)])
    refused = out.choices("refused", "wide")
    assert refused
    assert {choice.plugin for choice in refused} == {"core"}
    assert "no run of 29 free pages among" in refused[0].reason
    assert out.reason("wide") == "length"


@pytest.mark.parametrize(
    ("page_size", "batching", "overlap"),
    [
        (1, Chunked(slice_tokens=64), True),
        (4, PrefillFirst(), True),
        (16, Chunked(slice_tokens=64), False),
        (16, PrefillFirst(), False),
    ],
)
def test_over_admission_always_comes_to_an_end(page_size, batching, overlap):
    """Everyone is let in; taking back, preempting and trimming must still make progress."""
    rng = np.random.default_rng(page_size)
    engine = make_engine(
        pages=128 // page_size,
        page_size=page_size,
        budget=40,
        overlap=overlap,
        batching=batching,
        plugins={"mine": admit_all()},
    )
    arrivals = [
        Arrival(int(rng.integers(0, 30)), f"r{i}", int(rng.integers(1, 90)), 15) for i in range(8)
    ]
    out = run(engine, arrivals)
    assert out.preemptions() > 0
    assert {record.finish_reason for record in out.records.values()} == {"length"}


def test_request_preempted_with_a_token_in_flight_starts_again_after_it_came():
    """Otherwise a position would be sampled twice."""
    engine = make_engine(overlap=True)

    def preempt(step):
        if step == 4:
            sequence = sequence_of(engine, "A")
            assert engine.state.table.in_flight[sequence.slot] == 1
            engine.state.preempt(sequence)

    out = run(engine, [Arrival(0, "A", 10, 12)], before_step=preempt)
    (refused,) = out.choices("refused")
    assert refused.reason == "its latest token is still in flight"
    assert out.records["A"].preemptions == 1
    assert len(out.tokens("A")) == 12
