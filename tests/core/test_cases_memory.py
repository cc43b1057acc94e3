"""KV memory and prefix cache failures reported in public, scaled down (case ids K.., X.., S14)."""

import numpy as np
import pytest

from core.errors import InvariantError
from tests.engine_harness import (
    Arrival,
    check_alive,
    check_idle,
    finish,
    make_engine,
    prompt,
    run,
    script,
    sequence_of,
)

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def test_failed_growth_changes_nothing():
    """S14."""
    engine = make_engine(pages=3)
    engine.submit(Arrival(0, "A", 48, 4).request())
    engine.step()
    memory, sequence = engine.state.memory, sequence_of(engine, "A")
    before = memory.pages_of(sequence).copy()
    with pytest.raises(InvariantError, match="1 pages not to be had from a supply of 0"):
        memory.grow(np.array([sequence.slot]), np.array([1]))
    assert np.array_equal(memory.pages_of(sequence), before)
    assert len(before) == 3
    engine.abort("A")
    finish(engine)
    check_idle(engine)
    check_alive(engine)


def test_page_freed_twice_is_refused_by_allocator_and_ledger():
    """K01."""
    memory = make_engine(pages=4).state.memory
    pages = memory.allocator.allocate(2)
    memory.ledger.take(pages, "test")
    memory.allocator.free(memory.ledger.drop(pages))
    with pytest.raises(InvariantError, match="dropped more often than used"):
        memory.ledger.drop(pages)
    with pytest.raises(InvariantError):
        memory.allocator.free(pages)
    taken = memory.allocator.allocate(4)
    assert len(set(taken.tolist())) == 4


@OVERLAP
def test_eviction_leaves_pages_alone_that_a_running_request_uses(overlap):
    """K03."""
    engine = make_engine(pages=16, overlap=overlap)

    def evict_all(step):
        engine.state.memory._evict([engine.state.memory.supply])

    arrivals = [Arrival(0, "W", 64, 1), Arrival(4, "A", 80, 40, shares=("W", 64))]
    out = run(engine, [*arrivals, Arrival(6, "B", 100, 20)], before_step=evict_all)
    assert out.records["A"].cached_tokens == 0, "W's pages were evicted before A came"
    engine = make_engine(pages=16, overlap=overlap)
    locked = []

    def evict_after_start(step):
        if step >= 5:
            evict_all_of(engine)
            locked.append(engine.state.memory.ledger.num_tree)

    out = run(engine, [*arrivals, Arrival(6, "B", 100, 20)], before_step=evict_after_start)
    assert out.records["A"].cached_tokens == 64
    assert max(locked) >= 4, "A's prefix stayed"
    assert out.reason("A") == out.reason("B") == "length"


def evict_all_of(engine):
    engine.state.memory._evict([engine.state.memory.supply])


def full_of_finished(pages=8, **kwargs):
    """An engine whose pool holds nothing but evictable pages."""
    engine = make_engine(pages=pages, **kwargs)
    run(engine, [Arrival(0, f"old{i}", 32, 1) for i in range(pages // 2)])
    memory = engine.state.memory
    assert memory.ledger.num_free == 0
    assert memory.cache.num_evictable == pages
    return engine


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_evicts_when_the_pool_is_full_of_cached_pages(page_size, overlap):
    """K04, path: prefill."""
    engine = make_engine(pages=128 // page_size, page_size=page_size, overlap=overlap)
    run(engine, [Arrival(0, f"old{i}", 32, 1) for i in range(4)])
    assert engine.state.memory.ledger.num_free == 0
    out = run_more(engine, [Arrival(0, "A", 100, 4)])
    assert out["A"].finish_reason == "length"


def run_more(engine, arrivals):
    for arrival in arrivals:
        engine.submit(arrival.request(engine.clock.now()))
    finish(engine)
    check_idle(engine)
    return engine.records


@OVERLAP
def test_decode_growth_evicts_when_the_pool_is_full_of_cached_pages(overlap):
    """K04, path: decode growth."""
    engine = full_of_finished(overlap=overlap)
    records = run_more(engine, [Arrival(0, "A", 16, 100)])
    assert records["A"].finish_reason == "length"
    assert records["A"].preemptions == 0


@OVERLAP
def test_resume_evicts_when_the_pool_is_full_of_cached_pages(overlap):
    """K04, path: resume."""
    engine = full_of_finished(overlap=overlap)
    records = run_more(engine, [Arrival(0, "A", 40, 50), Arrival(0, "B", 40, 50)])
    assert sum(record.preemptions for record in records.values()) > 0
    assert records["A"].finish_reason == records["B"].finish_reason == "length"


@OVERLAP
def test_fork_evicts_when_the_pool_is_full_of_cached_pages(overlap):
    """K04, path: n > 1."""
    engine = full_of_finished(overlap=overlap)
    records = run_more(engine, [Arrival(0, "A", 40, 12, params={"n": 3})])
    assert [len(choice.token_ids) for choice in records["A"].choices] == [12, 12, 12]
    assert records["A"].preemptions == 0


@OVERLAP
@pytest.mark.parametrize("output_tokens", [1, 2, 3])
@pytest.mark.parametrize("prompt_tokens", [1, 29, 31, 32, 33])
def test_prompt_about_one_page_long_ends_cleanly(prompt_tokens, output_tokens, overlap):
    """K07."""
    engine = make_engine(pages=4, page_size=32, overlap=overlap)
    out = run(engine, [Arrival(0, "A", prompt_tokens, output_tokens)])
    assert len(out.tokens("A")) == output_tokens
    check_alive(engine)


@OVERLAP
@pytest.mark.parametrize("length", [16, 31, 32, 33, 48])
def test_same_prompt_again_recomputes_at_least_its_last_token(length, overlap):
    """X01."""
    engine = make_engine(overlap=overlap)
    out = run(engine, [Arrival(0, "A", length, 4), Arrival(20, "B", length, 4, ("A", length))])
    cached = (length - 1) // 16 * 16
    assert out.records["B"].cached_tokens == cached
    assert out.records["B"].computed_tokens == length - cached + 3


def test_each_turn_of_a_conversation_reuses_all_full_pages_of_the_turn_before():
    """X03."""
    turns = [Arrival(20 * i, f"T{i}", 64 + 16 * i, 1, ("T0", 64 + 16 * i)) for i in range(3)]
    out = run(make_engine(), turns)
    assert [out.records[f"T{i}"].cached_tokens for i in range(3)] == [0, 64, 80]


def test_next_turn_reuses_the_answer_of_the_turn_before():
    """X03: the output's full pages are kept as well."""
    engine = make_engine()
    first = Arrival(0, "T0", 40, 40).request()
    engine.submit(first)
    finish(engine)
    ids = np.concatenate([first.prompt, script(engine, first, 40), prompt("more", 10)])
    second = Arrival(0, "T1", 90, 1).request()
    second.prompt[:] = ids
    engine.submit(second)
    finish(engine)
    # 79 tokens of the first turn have KV: its last token was never run.
    assert engine.records["T1"].cached_tokens == 64


@OVERLAP
@pytest.mark.parametrize(("budget", "second"), [(256, 0), (32, 0), (32, 1)])
def test_twins_never_hit_pages_that_are_still_being_computed(budget, second, overlap):
    """X04: the executor checks what is read; both twins compute, and the waste is reported."""
    engine = make_engine(pages=32, budget=budget, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 64, 8), Arrival(second, "B", 64, 8, ("A", 64))])
    assert out.records["A"].cached_tokens == 0
    assert out.records["B"].cached_tokens <= 32
    wasted = out.total("duplicate_prefill_tokens")
    assert wasted == 64 - out.records["B"].cached_tokens


def test_cached_tokens_tell_nothing_across_namespaces():
    """X13."""
    names = ["a", "b", "a", ""]
    turns = [
        Arrival(20 * i, f"T{i}", 70, 1, ("T0", 70), fields={"namespace": name})
        for i, name in enumerate(names)
    ]
    out = run(make_engine(pages=32), turns)
    assert [out.records[f"T{i}"].cached_tokens for i in range(4)] == [0, 0, 64, 0]


@OVERLAP
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_prompt_logprobs_skip_the_cache_and_come_back_whole_twice(length, budget, overlap):
    """X14."""
    engine = make_engine(budget=budget, overlap=overlap)
    asks = {"prompt_logprobs": 1}
    out = run(
        engine,
        [
            Arrival(0, "W", length, 1),
            Arrival(20, "A", length, 1, ("W", length), asks),
            Arrival(40, "B", length, 1, ("W", length), asks),
        ],
    )
    for name in "AB":
        entries = out.records[name].prompt_logprobs
        assert out.records[name].cached_tokens == 0
        assert [entry.top_ids[0] for entry in entries] == prompt("W", length)[1:].tolist()


@OVERLAP
def test_prompt_logprobs_of_a_preempted_request_come_once(overlap):
    """X14 with a preemption in the middle of the prompt and one after it."""
    engine = make_engine(budget=16, overlap=overlap)

    def preempt(step):
        if step in (2, 8):
            engine.state.preempt(sequence_of(engine, "A"))

    out = run(engine, [Arrival(0, "A", 60, 8, params={"prompt_logprobs": 1})], before_step=preempt)
    assert out.records["A"].preemptions == 2
    entries = out.records["A"].prompt_logprobs
    assert [entry.top_ids[0] for entry in entries] == prompt("A", 60)[1:].tolist()
