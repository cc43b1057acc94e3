"""What ends a stream: end tokens, stop_token_ids, ignore_eos, min_tokens, lengths."""

import pytest

from plugins.executor.fake import Fake
from tests.engine_harness import VOCAB, Arrival, make_engine, run, script

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
ENDS = (3, 5)


def ending_engine(end_at, overlap, pages=16):
    """Requests with seed s get their first end token at output position end_at[s]."""
    fake = Fake(vocab_size=VOCAB, max_model_len=1024, end_token_ids=ENDS, end_at=end_at)
    return make_engine(pages=pages, executor=fake, overlap=overlap)


def asks(seed, **params):
    return {"ignore_eos": False, "seed": seed} | params


@OVERLAP
@pytest.mark.parametrize("position", [0, 1, 6, 7, 8])
def test_end_token_stops_and_is_the_last_token(position, overlap):
    engine = ending_engine({1: position}, overlap)
    out = run(engine, [Arrival(0, "A", 10, 8 + 1, params=asks(1))])
    assert out.reason("A") == "stop"
    assert len(out.tokens("A")) == position + 1
    assert out.tokens("A")[-1] in ENDS


@OVERLAP
def test_end_token_on_the_last_allowed_token_reports_stop(overlap):
    engine = ending_engine({1: 3, 2: 4}, overlap)
    params = {"A": asks(1), "B": asks(2)}
    out = run(engine, [Arrival(0, name, 10, 4, params=p) for name, p in params.items()])
    assert [out.reason("A"), out.reason("B")] == ["stop", "length"]
    assert [len(out.tokens("A")), len(out.tokens("B"))] == [4, 4]


@OVERLAP
def test_ignore_eos_runs_on_to_the_length(overlap):
    engine = ending_engine({1: 2}, overlap)
    out = run(engine, [Arrival(0, "A", 10, 8, params=asks(1, ignore_eos=True))])
    assert out.reason("A") == "length"
    assert out.tokens("A")[2] in ENDS


@OVERLAP
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids_stop_also_when_eos_is_ignored(ignore_eos, overlap):
    engine = ending_engine({1: 30}, overlap)
    plain = Arrival(0, "A", 10, 40, params=asks(1)).request()
    stream = script(engine, plain, 40)
    stop = stream[6]
    params = asks(1, stop_token_ids=(stop,), ignore_eos=ignore_eos)
    out = run(engine, [Arrival(0, "A", 10, 40, params=params)])
    assert out.reason("A") == "stop"
    assert out.tokens("A") == stream[: stream.index(stop) + 1]


@OVERLAP
@pytest.mark.parametrize(("ignore_eos", "num_tokens"), [(False, 5), (True, 9)])
def test_stop_token_ids_come_on_top_of_the_models_end_tokens(ignore_eos, num_tokens, overlap):
    engine = ending_engine({1: 4}, overlap)
    absent = next(t for t in range(6, VOCAB) if t not in script_of(engine))
    params = asks(1, stop_token_ids=(absent,), ignore_eos=ignore_eos)
    out = run(engine, [Arrival(0, "A", 10, 9, params=params)])
    assert len(out.tokens("A")) == num_tokens


def script_of(engine):
    return script(engine, Arrival(0, "A", 10, 9, params=asks(1)).request(), 9)


@OVERLAP
def test_min_tokens_masks_end_and_stop_tokens_before_it(overlap):
    engine = ending_engine({1: 2}, overlap)
    stream = script_of(engine)
    params = asks(1, min_tokens=6, stop_token_ids=(stream[4], stream[7]))
    out = run(engine, [Arrival(0, "A", 10, 9, params=params)])
    assert out.reason("A") == "stop"
    assert len(out.tokens("A")) == 8
    assert not set(out.tokens("A")[:6]) & {*ENDS, stream[4], stream[7]}


def test_extra_token_of_an_overlapped_stop_is_dropped_and_its_page_freed_once():
    # The 7th token would be stored at position 16: a new page, taken before the stop is known.
    engine = ending_engine({1: 6}, overlap=True, pages=4)
    out = run(engine, [Arrival(0, "A", 10, 40, params=asks(1)), Arrival(0, "B", 20, 20)])
    assert len(out.tokens("A")) == 7
    assert engine.executor.num_tokens > out.records["A"].computed_tokens + 38
    assert sum(("A", 0) in event.rows for event in out.events) == 7


@OVERLAP
def test_stopped_requests_leave_their_pages_to_the_cache(overlap):
    engine = ending_engine({1: 30}, overlap)
    first = Arrival(0, "A", 40, 60, params=asks(1)).request()
    engine.submit(first)
    while engine.has_work:
        engine.step()
    # 40 prompt tokens and 30 of 31 output tokens have KV for sure.
    assert engine.state.memory.ledger.num_tree == 70 // 16


@OVERLAP
def test_end_token_arriving_after_a_preemption_ends_the_waiting_request(overlap):
    """The late token of a preempted row is kept; if it is an end token the request ends there."""
    ends = dict.fromkeys(range(1, 9), 10)
    engine = ending_engine(ends, overlap, pages=8)
    arrivals = [Arrival(0, f"r{s}", 22, 30, params=asks(s)) for s in range(1, 9)]
    out = run(engine, arrivals)
    assert {record.finish_reason for record in out.records.values()} == {"stop"}
    assert all(len(out.tokens(name)) == 11 for name in out.records)
