"""n > 1: one request, several streams that share the prompt's whole pages."""

import numpy as np
import pytest

from core.ledger import PageClass
from core.request import FinishReason
from core.table import State
from plugins.allocator.contiguous import Contiguous
from plugins.cache.none import NoCache
from plugins.executor.fake import Fake
from plugins.order.priority import Priority
from plugins.preemption.evict_shortest import EvictShortest
from plugins.preemption.priority import PreemptLowestPriority
from tests.engine_harness import (
    VOCAB,
    Arrival,
    check_idle,
    finish,
    make_engine,
    run,
    script,
    sequence_of,
)

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
CACHES = pytest.mark.parametrize("cache", [None, NoCache()])


def with_cache(cache):
    return {} if cache is None else {"cache": cache}


def asks(n, **params):
    return {"n": n} | params


@OVERLAP
@CACHES
@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 40, 48])
def test_choices_are_different_streams_of_full_length(prompt_tokens, cache, overlap):
    engine = make_engine(overlap=overlap, **with_cache(cache))
    out = run(engine, [Arrival(0, "A", prompt_tokens, 10, params=asks(3))])
    streams = [tuple(out.tokens("A", choice)) for choice in range(3)]
    assert len(set(streams)) == 3
    assert [len(stream) for stream in streams] == [10, 10, 10]
    assert {choice.finish_reason for choice in out.records["A"].choices} == {"length"}


@OVERLAP
@CACHES
def test_choices_share_whole_prompt_pages_and_recompute_the_tail(cache, overlap):
    engine = make_engine(pages=16, overlap=overlap, **with_cache(cache))
    engine.submit(Arrival(0, "A", 40, 5, params=asks(4)).request())
    for _ in range(2 + overlap):
        engine.step()
    memory = engine.state.memory
    pages = [memory.pages_of(sequence_of(engine, "A", choice)).tolist() for choice in range(4)]
    assert all(row[:2] == pages[0][:2] for row in pages)
    assert len({row[2] for row in pages}) == 4, "tails are their own"
    assert memory.ledger.num_pages - memory.ledger.num_free == 2 + 4
    finish(engine)
    # 40 for the first, 8 tail tokens for each other, 4 decodes of each: the last token has no KV.
    assert engine.records["A"].computed_tokens == 40 + 3 * 8 + 4 * 4
    check_idle(engine)


@OVERLAP
def test_prompt_of_whole_pages_recomputes_its_last_page_for_each_fork(overlap):
    out = run(make_engine(overlap=overlap), [Arrival(0, "A", 32, 1, params=asks(3))])
    assert out.records["A"].computed_tokens == 32 + 2 * 16


@OVERLAP
@CACHES
def test_forks_wait_when_no_slot_is_free(cache, overlap):
    engine = make_engine(seqs=2, overlap=overlap, **with_cache(cache))
    arrivals = [Arrival(0, "A", 40, 6, params=asks(4)), Arrival(0, "B", 10, 20)]
    out = run(engine, arrivals)
    assert max(event.record.running for event in out.events) <= 2
    assert [len(choice.token_ids) for choice in out.records["A"].choices] == [6, 6, 6, 6]
    admitted = [choice.choice for choice in out.choices("admitted", "A")]
    assert admitted == [0, 1, 2, 3]
    assert out.records["A"].cached_tokens == 0, "its own pages are no hit"


@OVERLAP
def test_more_choices_than_rows_all_come_to_their_end(overlap):
    out = run(make_engine(seqs=3, overlap=overlap), [Arrival(0, "A", 20, 3, params=asks(20))])
    assert [len(choice.token_ids) for choice in out.records["A"].choices] == [3] * 20


def test_prefix_of_a_fork_stays_locked_when_the_first_choice_is_gone():
    engine = make_engine(end_token_ids=(1,))
    engine.submit(Arrival(0, "A", 40, 30, params=asks(2)).request())
    for _ in range(3):
        engine.step()
    first, fork = (sequence_of(engine, "A", choice) for choice in (0, 1))
    engine.state.finish(first, FinishReason.stop)
    memory = engine.state.memory
    shared = memory.pages_of(fork)[:2].copy()
    memory._evict([memory.supply])
    assert (memory.ledger.classes[shared] == PageClass.TREE).all()
    assert len(memory.cache.evict(99)) == 0
    finish(engine)
    check_idle(engine)


@OVERLAP
@CACHES
@pytest.mark.parametrize("preemption", [None, EvictShortest()])
def test_preempted_forks_resume_with_their_own_tokens(preemption, cache, overlap):
    victims = {} if preemption is None else {"preemption": preemption}
    engine = make_engine(pages=8, overlap=overlap, **victims, **with_cache(cache))
    out = run(engine, [Arrival(0, "A", 40, 40, params=asks(3)), Arrival(0, "B", 20, 30)])
    preempted = {(c.request_id, c.choice) for c in out.choices("preempted")}
    assert any(choice > 0 for _, choice in preempted)
    assert [len(choice.token_ids) for choice in out.records["A"].choices] == [40] * 3


@OVERLAP
def test_first_choice_may_be_preempted_before_the_others_are_forked(overlap):
    policies = {"urgent_first": Priority(), "least_urgent": PreemptLowestPriority()}
    engine = make_engine(seqs=1, budget=16, overlap=overlap, plugins=policies)
    low, high = {"priority": 9}, {"priority": 0}
    arrivals = [
        Arrival(0, "A", 60, 5, params=asks(2), fields=low),
        Arrival(2, "B", 5, 2, fields=high),
    ]
    out = run(engine, arrivals)
    first = out.choices("preempted")[0]
    assert (first.request_id, first.choice) == ("A", 0)
    assert first.detail["lost_tokens"] < 60
    assert [len(choice.token_ids) for choice in out.records["A"].choices] == [5, 5]


@OVERLAP
@CACHES
@pytest.mark.parametrize("steps", range(1, 9))
def test_abort_ends_all_choices_whether_they_run_wait_or_are_not_forked(steps, cache, overlap):
    """40 prompt tokens at 16 a step: forks come in step 2; one of them finds no slot."""
    engine = make_engine(seqs=2, budget=16, overlap=overlap, **with_cache(cache))
    out = run(engine, [Arrival(0, "A", 40, 6, params=asks(3))], aborts={"A": steps})
    assert out.reason("A") == "abort"
    assert {choice.finish_reason for choice in out.records["A"].choices} <= {"abort", "length"}


@OVERLAP
def test_abort_of_preempted_forks(overlap):
    engine = make_engine(pages=6, overlap=overlap)
    engine.submit(Arrival(0, "A", 30, 60, params=asks(3)).request())
    for _ in range(200):
        engine.step()
        waiting = [s for s in engine.state.live["A"].sequences if s.id in engine.state.waiting]
        if any(engine.state.table.preemptions[s.slot] for s in waiting):
            break
    else:
        raise AssertionError("no fork was preempted")
    engine.abort("A")
    finish(engine)
    assert engine.records["A"].finish_reason == "abort"
    check_idle(engine)


@OVERLAP
def test_choices_end_one_by_one_and_the_request_with_the_last(overlap):
    ends = tuple(range(100))
    engine = make_engine(overlap=overlap, end_token_ids=ends)
    request = Arrival(0, "A", 20, 40, params=asks(4, ignore_eos=False)).request()
    engine.submit(request)
    finish(engine)
    record = engine.records["A"]
    lengths = []
    for choice, entry in enumerate(record.choices):
        stream = script(engine, request, 40, choice)
        first = next((i for i, token in enumerate(stream) if token in ends), None)
        lengths.append(40 if first is None else first + 1)
        assert list(entry.token_ids) == stream[: lengths[-1]]
        assert entry.finish_reason == ("length" if first is None else "stop")
    assert len(set(lengths)) > 1
    assert record.finished_s == max(choice.times_s[-1] for choice in record.choices)
    check_idle(engine)


@OVERLAP
def test_first_choice_that_stops_at_once_does_not_take_the_others_along(overlap):
    fake = Fake(vocab_size=VOCAB, end_token_ids=(1,))
    stream_of = Arrival(0, "A", 20, 4, params=asks(2, ignore_eos=False)).request()
    first = fake.stream(0, stream_of, 0, 1)[0]
    engine = make_engine(overlap=overlap, end_token_ids=(first,))
    out = run(engine, [Arrival(0, "A", 20, 4, params=asks(2, ignore_eos=False))])
    ends = [choice.finish_reason for choice in out.records["A"].choices]
    assert ends[0] == "stop"
    assert ends[1] != "abort"
    assert len(out.tokens("A", 1)) > 1


@OVERLAP
@pytest.mark.parametrize("seed", range(3))
def test_choices_with_a_contiguous_allocator_reserve_their_own_run(seed, overlap):
    """Growing on demand would need a run of free pages that fragmented memory does not have."""
    rng = np.random.default_rng(seed)
    engine = make_engine(
        pages=64, page_size=1, overlap=overlap, cache=NoCache(), allocator=Contiguous(1)
    )
    arrivals = [
        Arrival(
            int(rng.integers(0, 10)),
            f"r{i}",
            int(rng.integers(1, 20)),
            int(rng.integers(1, 12)),
            params=asks(int(rng.integers(1, 5))),
        )
        for i in range(10)
    ]
    out = run(engine, arrivals)
    assert {record.finish_reason for record in out.records.values()} == {"length"}
    assert out.preemptions() == 0


def test_late_prompt_logprobs_belong_to_the_request_once_and_to_no_fork():
    engine = make_engine(budget=16)
    params = asks(3, prompt_logprobs=1)
    out = run(engine, [Arrival(0, "A", 40, 4, params=params)])
    assert len(out.records["A"].prompt_logprobs) == 39


def test_fork_is_running_and_counted_in_admission_order():
    engine = make_engine()
    engine.submit(Arrival(0, "A", 20, 5, params=asks(3)).request())
    engine.step()
    table = engine.state.table
    slots = [sequence_of(engine, "A", choice).slot for choice in range(3)]
    assert [table.state[slot] for slot in slots] == [State.RUNNING] * 3
    assert [int(table.admitted_order[slot]) for slot in slots] == [1, 2, 3]
    assert engine.state.running.tolist() == slots
