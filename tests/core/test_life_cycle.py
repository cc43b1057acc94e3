"""A request from submission to its end: ids, refusals, what it sees of others, its record."""

import threading

import numpy as np
import pytest

from core.errors import RequestError
from core.request import Request, SamplingParams
from plugins.cache.none import NoCache
from plugins.order.priority import Priority
from tests.engine_harness import (
    VOCAB,
    Arrival,
    check_alive,
    check_idle,
    finish,
    make_engine,
    run,
    script,
)

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def test_duplicate_of_a_live_id_is_refused_and_the_first_goes_on():
    engine = make_engine()
    engine.submit(Arrival(0, "A", 10, 8).request())
    engine.step()
    with pytest.raises(RequestError, match="request_id 'A' is in use by an unfinished request"):
        engine.submit(Arrival(0, "A", 10, 2).request())
    finish(engine)
    assert len(engine.records["A"].choices[0].token_ids) == 8


def test_duplicate_of_a_queued_id_is_refused_to_its_submitter_and_never_breaks_a_step():
    engine = make_engine()
    engine.submit(Arrival(0, "A", 10, 8).request())
    with pytest.raises(RequestError, match="request_id 'A' is in use by an unfinished request"):
        engine.submit(Arrival(0, "A", 10, 2).request())
    finish(engine)
    assert len(engine.records["A"].choices[0].token_ids) == 8


def test_id_may_come_again_after_its_end():
    engine = make_engine()
    for output_tokens in (3, 5):
        engine.submit(Arrival(0, "A", 10, output_tokens).request())
        finish(engine)
        assert len(engine.records["A"].choices[0].token_ids) == output_tokens
    check_idle(engine)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_prompt_token_outside_the_vocabulary_is_refused(token):
    engine = make_engine()
    with pytest.raises(
        RequestError,
        match=rf"prompt of request 'A' must hold token ids in \[0, {VOCAB}\), got {token}",
    ):
        engine.submit(Request("A", np.array([1, token, 2], np.int32)))
    assert not engine.has_work
    check_alive(engine)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ],
)
def test_other_token_ids_outside_the_vocabulary_are_refused(params, field):
    with pytest.raises(RequestError, match=f"{field} of request 'A' must hold token ids in"):
        make_engine().submit(Request("A", np.ones(3, np.int32), SamplingParams(**params)))


def test_submit_and_abort_from_other_threads_lose_nothing():
    engine = make_engine(pages=64, strict=False)

    def client(number):
        for index in range(50):
            engine.submit(Arrival(0, f"{number}-{index}", 5, 2).request())
        engine.abort(f"{number}-0")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_work:
        engine.step()
    finish(engine)
    assert len(engine.records) == 200
    assert all(record.finish_reason for record in engine.records.values())
    check_idle(engine)


def test_has_work_until_the_last_token_is_committed():
    engine = make_engine(overlap=True)
    assert not engine.has_work
    assert engine.step() is None
    engine.submit(Arrival(0, "A", 4, 1).request())
    assert engine.has_work
    assert engine.step() is None, "launched, not collected"
    assert engine.has_work
    event = engine.step()
    assert event is not None
    assert [record.request_id for record in event.finished] == ["A"]
    assert not engine.has_work


@OVERLAP
def test_forced_output_ignores_end_tokens_and_is_bounded_by_max_tokens(overlap):
    engine = make_engine(end_token_ids=tuple(range(0, VOCAB, 2)), overlap=overlap)
    use = {"ignore_eos": False}
    out = run(
        engine,
        [
            Arrival(0, "A", 8, 50, params=use, fields={"forced_output": 20}),
            Arrival(0, "B", 8, 10, params=use, fields={"forced_output": 20}),
        ],
    )
    assert [len(out.tokens("A")), len(out.tokens("B"))] == [20, 10]
    assert out.reason("A") == out.reason("B") == "length"


def test_forced_output_is_hidden_from_policies():
    engine = make_engine()
    request = Arrival(0, "A", 8, 50, fields={"forced_output": 20}).request()
    engine.submit(request)
    engine.step()
    view = engine.state.table.view(engine.state.running)
    assert view.max_output[0] == 50
    with pytest.raises(AttributeError, match="no fact 'output_limit'"):
        _ = view.output_limit


@OVERLAP
def test_cache_false_neither_reads_nor_writes_the_cache(overlap):
    engine = make_engine(overlap=overlap)
    out = run(
        engine,
        [
            Arrival(0, "A", 40, 2, fields={"cache": False}),
            Arrival(10, "B", 40, 2, ("A", 40)),
            Arrival(20, "C", 40, 2, ("A", 40), fields={"cache": False}),
            Arrival(30, "D", 40, 2, ("A", 40)),
        ],
    )
    assert [out.records[name].cached_tokens for name in "ABCD"] == [0, 0, 0, 32]


@OVERLAP
def test_tokens_do_not_depend_on_what_runs_beside(overlap):
    arrivals = [Arrival(i, f"r{i}", 5 + 7 * i, 30) for i in range(8)]
    crowded = run(make_engine(pages=12, overlap=overlap), arrivals)
    assert crowded.preemptions() > 0
    alone = run(make_engine(cache=NoCache()), arrivals[3:4])
    assert crowded.tokens("r3") == alone.tokens("r3")


def test_seed_of_the_request_beats_the_runs():
    tokens = {}
    for seed in (0, 1):
        engine = make_engine(seed=seed)
        engine.submit(Arrival(0, "free", 5, 8).request())
        engine.submit(Arrival(0, "fixed", 5, 8, params={"seed": 7}).request())
        finish(engine)
        tokens[seed] = {n: list(r.choices[0].token_ids) for n, r in engine.records.items()}
    assert tokens[0]["fixed"] == tokens[1]["fixed"]
    assert tokens[0]["free"] != tokens[1]["free"]


@OVERLAP
def test_every_step_record_accounts_for_the_whole_pool(overlap):
    engine = make_engine(pages=8, overlap=overlap)
    arrivals = [Arrival(0, f"r{i}", 40, 30) for i in range(4)]
    out = run(engine, [*arrivals, Arrival(3, "big", 500, 4), Arrival(60, "last", 100, 40)])
    for event in out.events:
        record = event.record
        assert record.pages_free + record.pages_tree + record.pages_request == 8, record.step
        assert record.pages_evictable <= record.pages_tree
        assert 0 <= record.used_tokens <= record.pages_request * 16


def test_request_record_holds_the_timeline():
    engine = make_engine(budget=16)
    request = Arrival(0, "A", 40, 3).request()
    engine.submit(request)
    finish(engine)
    record = engine.records["A"]
    tokens = record.choices[0]
    assert list(tokens.token_ids) == script(engine, request, 3)
    assert record.prompt_tokens == 40
    assert record.computed_tokens == 42
    assert record.admitted_s == 0.0
    assert record.first_token_s == tokens.times_s[0] > 0
    assert record.finished_s == tokens.times_s[-1]
    assert list(tokens.steps) == [2, 3, 4]


def test_priorities_order_the_queue_smallest_first():
    engine = make_engine(seqs=1, plugins={"mine": Priority()})
    levels = {"A": 1, "B": 5, "C": -3, "D": 1}
    arrivals = [Arrival(0, name, 8, 2, fields={"priority": p}) for name, p in levels.items()]
    out = run(engine, arrivals)
    assert sorted(levels, key=out.first_token_step) == ["C", "A", "D", "B"]


def test_close_releases_the_executor():
    engine = make_engine()
    engine.submit(Arrival(0, "A", 8, 4).request())
    closed = []
    engine.executor.close = lambda: closed.append(True)
    engine.close()
    assert closed == [True]


@pytest.mark.parametrize("record_rows", [True, False])
def test_rows_are_listed_only_if_asked_for(record_rows):
    engine = make_engine()
    engine.record_rows = record_rows
    out = run(engine, [Arrival(0, "A", 10, 3)])
    assert [event.record.num_rows for event in out.events] == [1, 1, 1]
    assert [len(event.record.rows) for event in out.events] == [int(record_rows)] * 3
