"""Scheduling failures reported in public, scaled down (case ids S..)."""

import numpy as np
import pytest

from plugins.batching.chunked import Chunked
from plugins.batching.prefill_first import PrefillFirst
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.order.priority import Priority
from plugins.preemption.evict_shortest import EvictShortest
from plugins.preemption.last_admitted import LastAdmitted
from plugins.preemption.priority import PreemptLowestPriority
from tests.engine_harness import Arrival, check_alive, make_engine, run, sequence_of

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@OVERLAP
def test_request_larger_than_pool_fails_at_once_and_the_rest_runs(overlap):
    """S01."""
    engine = make_engine(pages=8, max_model_len=512, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 200, 4), Arrival(1, "B", 16, 4)])
    assert out.reason("A") == "capacity"
    assert "13 pages (208 tokens)" in out.records["A"].error
    assert "8 pages (128 tokens)" in out.records["A"].error
    assert out.reason("B") == "length"
    assert out.first_token_step("B") == 1
    check_alive(engine)


@OVERLAP
@pytest.mark.parametrize("batching", [Chunked(slice_tokens=32), PrefillFirst()])
def test_two_prompts_that_fill_the_pool_together_both_finish(batching, overlap):
    """S03."""
    engine = make_engine(pages=8, budget=32, batching=batching, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 96, 4), Arrival(0, "B", 96, 4)], max_steps=30)
    assert [out.reason("A"), out.reason("B")] == ["length", "length"]


@OVERLAP
def test_last_running_request_that_cannot_grow_is_ended_and_the_engine_lives(overlap):
    """S04."""
    engine = make_engine(pages=4, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 48, 64), Arrival(60, "B", 16, 4)])
    assert out.reason("A") == "capacity"
    assert "4 of the pool's 4 pages (64 tokens)" in out.records["A"].error
    # 64 tokens fit, and the last token needs no slot of its own.
    assert len(out.tokens("A")) == 64 - 48 + 1
    assert out.reason("B") == "length"
    check_alive(engine)


@OVERLAP
def test_step_record_says_why_the_last_running_request_was_ended(overlap):
    """S04: the reason is in the step records too."""
    out = run(make_engine(pages=4, overlap=overlap), [Arrival(0, "A", 48, 64)])
    (choice,) = out.choices("finished", "A")
    assert choice.plugin == "core"
    assert choice.reason == out.records["A"].error


@OVERLAP
@pytest.mark.parametrize("preemption", [LastAdmitted(), EvictShortest()])
def test_preemption_counts_pages_that_really_come_free_when_tails_are_shared(preemption, overlap):
    """S06."""
    engine = make_engine(pages=6, page_size=32, preemption=preemption, overlap=overlap)
    same = ("base", 32)
    out = run(engine, [Arrival(0, name, 40, 60, shares=same) for name in "ABC"])
    assert out.preemptions() > 0
    assert {record.finish_reason for record in out.records.values()} == {"length"}


def stream_of_prompts(batching):
    arrivals = [Arrival(step, f"X{step}", 64, 1) for step in range(1, 101)]
    engine = make_engine(pages=64, budget=32, batching=batching)
    return run(engine, [Arrival(0, "A", 8, 50), *arrivals])


def test_chunked_decodes_in_every_step_while_prompts_keep_arriving():
    """S09."""
    out = stream_of_prompts(Chunked(slice_tokens=32))
    assert int(np.diff(out.token_steps("A")).max()) == 1
    assert out.last_token_step("A") == 49


def test_prefill_first_stalls_decodes_for_as_long_as_prompts_arrive():
    """S09: by design of that policy, recorded here; `chunked` is the one that bounds the gap."""
    out = stream_of_prompts(PrefillFirst())
    assert int(np.diff(out.token_steps("A")).max()) >= 100 * 64 // 32
    assert out.reason("A") == "length"


@pytest.mark.parametrize(
    ("batching", "least", "most"),
    [
        (Chunked(slice_tokens=16), 1, 5),
        (Chunked(slice_tokens=16, short_share=0.0), 39, 41),
        (PrefillFirst(), 39, 41),
    ],
)
def test_wait_behind_one_huge_prompt_per_batching_policy(batching, least, most):
    """S10: strict order and prefill_first keep the wait by design, the default bounds it."""
    engine = make_engine(pages=64, budget=16, batching=batching)
    out = run(engine, [Arrival(0, "A", 640, 1), Arrival(1, "B", 10, 4)])
    assert least <= out.first_token_step("B") - 1 <= most


@pytest.mark.parametrize(
    ("batching", "first"), [(Chunked(slice_tokens=16), "D"), (PrefillFirst(), "A")]
)
def test_short_cached_request_against_running_prefills(batching, first):
    """S12: the default lets the hit overtake; prefill_first keeps its order by design."""
    engine = make_engine(pages=64, budget=16, batching=batching)
    long = [Arrival(40, "A", 320, 1), Arrival(40, "B", 320, 1)]
    hit = Arrival(42, "D", 69, 1, shares=("W", 64))
    out = run(engine, [Arrival(0, "W", 64, 1), *long, hit])
    assert out.records["D"].cached_tokens == 64
    assert min("ABD", key=out.first_token_step) == first


def urgent_first(seqs=2, pages=64):
    plugins = {"urgent_first": Priority(), "least_urgent": PreemptLowestPriority()}
    return make_engine(pages=pages, seqs=seqs, plugins=plugins)


def test_urgent_request_displaces_the_least_urgent_when_slots_are_full():
    """S15."""
    low, high = {"priority": 9}, {"priority": 0}
    arrivals = [Arrival(0, "L1", 16, 200, fields=low), Arrival(0, "L2", 16, 200, fields=low)]
    out = run(urgent_first(), [*arrivals, Arrival(2, "U", 16, 4, fields=high)])
    assert out.last_token_step("U") == 5
    (preempted,) = out.choices("preempted")
    assert preempted.request_id == "L2"
    assert preempted.plugin == "least_urgent"
    assert preempted.detail["cause"] == "slots"
    assert preempted.detail["beneficiary"] == "U"
    assert out.records["L1"].preemptions == 0


def test_equal_priority_never_displaces():
    """S15: no ping-pong between equals."""
    same = {"priority": 5}
    arrivals = [Arrival(0, "L1", 16, 40, fields=same), Arrival(0, "L2", 16, 40, fields=same)]
    out = run(urgent_first(), [*arrivals, Arrival(2, "U", 16, 4, fields=same)])
    assert out.preemptions() == 0
    assert out.first_token_step("U") >= 40


def test_urgent_request_displaces_for_pages():
    """S15 with the pool full in place of the slots."""
    low, high = {"priority": 9}, {"priority": 0}
    arrivals = [Arrival(0, "L1", 60, 30, fields=low), Arrival(0, "L2", 60, 30, fields=low)]
    out = run(urgent_first(8, pages=10), [*arrivals, Arrival(2, "U", 100, 4, fields=high)])
    causes = [choice.detail["cause"] for choice in out.choices("preempted")]
    assert causes[0] == "displace"
    assert out.last_token_step("U") < min(map(out.last_token_step, ["L1", "L2"]))


@pytest.mark.parametrize("preemption", [LastAdmitted(), EvictShortest()])
def test_preempted_resume_before_fresh_arrivals_and_are_not_hit_again_and_again(preemption):
    """S16."""
    engine = make_engine(pages=8, seqs=4, preemption=preemption)
    early = [Arrival(0, name, 24, 60) for name in "ABCD"]
    late = [Arrival(5 * i, f"E{i}", 24, 8) for i in range(1, 20)]
    out = run(engine, early + late)
    assert out.preemptions() > 0
    assert max(record.preemptions for record in out.records.values()) <= 4
    waiting = set()
    for event in out.events:
        for choice in event.record.choices:
            if choice.kind == "preempted":
                waiting.add(choice.request_id)
            waiting -= {choice.request_id} if choice.kind == "resumed" else set()
            if choice.kind == "admitted":
                assert not waiting & set("ABCD"), "a newcomer started before an older preempted one"


@OVERLAP
def test_resumed_request_counts_its_own_old_pages_once(overlap):
    """S18."""
    engine = make_engine(pages=10, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 40, 60), Arrival(0, "B", 40, 60)])
    resumed = out.choices("resumed", "B")
    assert resumed
    assert resumed[0].detail["cached_tokens"] > 0
    assert out.records["B"].resumed_cached_tokens > 0
    assert out.records["B"].cached_tokens == 0, "its own pages are no hit"
    assert {record.finish_reason for record in out.records.values()} == {"length"}


def preempting(engine, name, outputs):
    """A before_step that preempts a request whenever it has so many output tokens."""
    left = list(outputs)

    def before_step(step):
        if left and name in engine.state.live:
            sequence = sequence_of(engine, name)
            known = len(engine.state.table.tokens(sequence)) - len(sequence.request.prompt)
            if known >= left[0] and sequence.row is not None:
                engine.state.preempt(sequence)
                left.pop(0)

    return before_step


@OVERLAP
@pytest.mark.parametrize("cache", [Radix, NoCache])
@pytest.mark.parametrize("batching", [Chunked(slice_tokens=32), PrefillFirst()])
def test_resumed_request_prefills_what_it_lost_and_goes_on(batching, cache, overlap):
    """S19: three times; the phase comes from computed against known tokens alone."""
    engine = make_engine(budget=32, overlap=overlap, batching=batching, cache=cache())
    hook = preempting(engine, "A", [5, 10, 15])
    out = run(engine, [Arrival(0, "A", 40, 20), Arrival(0, "B", 10, 30)], before_step=hook)
    assert out.records["A"].preemptions == 3
    assert len(out.tokens("A")) == 20
    lost = sum(choice.detail["cached_tokens"] for choice in out.choices("resumed", "A"))
    assert out.records["A"].recomputed_tokens + lost >= 45 + 50 + 55 - 3
    assert (lost > 0) == (cache is Radix)


@OVERLAP
def test_stream_of_a_resumed_request_has_each_token_once(overlap):
    """S24: prompt of 3, preempted at 20 outputs; re-prefill covers prompt and outputs."""
    engine = make_engine(overlap=overlap)
    streams = []
    for name, hook in [("A", None), ("B", preempting(engine, "B", [20]))]:
        arrival = Arrival(0, name, 3, 40, ("A", 3), params={"seed": 1})
        out = run_again(engine, arrival, hook)
        streams.append([int(t) for event in out for t in event.token_ids])
    assert engine.records["B"].preemptions == 1
    assert streams[0] == streams[1]
    assert len(streams[0]) == 40
    assert engine.records["B"].recomputed_tokens >= 22 - 16


def run_again(engine, arrival, before_step):
    engine.submit(arrival.request(engine.clock.now()))
    events = []
    for step in range(200):
        if before_step is not None:
            before_step(step)
        event = engine.step()
        events += [] if event is None else [event]
        if not engine.has_work:
            return events
    raise AssertionError("not done")


def test_full_prefill_gate_bounds_recomputing_with_long_prompts_and_no_cache():
    """S21."""
    engine = make_engine(pages=12, budget=16, seqs=8, cache=NoCache())
    out = run(engine, [Arrival(0, f"L{i}", 80, 8) for i in range(8)])
    assert out.total("prefill_tokens") <= 1.5 * 8 * 80


def test_different_lengths_alone_never_preempt():
    """S22."""
    lengths = {"A": 10, "B": 50, "C": 120}
    out = run(make_engine(pages=64), [Arrival(0, n, p, 100) for n, p in lengths.items()])
    assert out.preemptions() == 0
    assert int(np.diff(out.token_steps("A")).max()) == 1


@pytest.mark.parametrize(
    ("cache", "fields"), [(NoCache(), {}), (None, {"cache": False}), (None, {"cache": True})]
)
def test_chunked_prefill_advances_without_the_cache(cache, fields):
    """S26."""
    engine = make_engine(budget=32, **({"cache": cache} if cache else {}))
    out = run(engine, [Arrival(0, "A", 200, 4, fields=fields)])
    assert sum(event.record.prefill_tokens > 0 for event in out.events) == 7
    assert out.total("prefill_tokens") == 200
    kept = engine.state.memory.ledger.num_tree
    assert (kept > 0) == (cache is None and fields["cache"])


@OVERLAP
def test_request_that_ends_with_its_first_token_in_a_mixed_batch_gives_its_slot_back(overlap):
    """S28."""
    engine = make_engine(pages=64, seqs=4, overlap=overlap)
    short = [Arrival(3 + i, f"B{i}", 40, 1) for i in range(120)]
    out = run(engine, [Arrival(0, "A", 8, 150), *short])
    mixed = [e for e in out.events if e.record.prefill_tokens and e.record.decode_tokens]
    assert len(mixed) >= 120
    assert all(out.first_token_step(f"B{i}") <= 3 + i + 1 for i in range(120))
