"""A request goes on from output that another engine made, as if it had never stopped."""

import dataclasses

import numpy as np
import pytest

from core.errors import RequestError
from core.request import Request
from plugins.allocator.contiguous import Contiguous
from plugins.cache.none import NoCache
from plugins.executor.fake import Fake
from tests.engine_harness import (
    LONGEST,
    VOCAB,
    Arrival,
    check_idle,
    finish,
    make_engine,
    script,
)

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
OTHERS = pytest.mark.parametrize("others", [{}, {"cache": NoCache()}])


def resumed(request: Request, **outputs: list[int]) -> Request:
    """`request` with the output c0, c1, ... of its choices."""
    made = {int(name[1:]): np.array(tokens, np.int32) for name, tokens in outputs.items()}
    return dataclasses.replace(request, resumed=made)


def made_by(engine, request, choice=0):
    return list(engine.records[request.request_id].choices[choice].token_ids)


@OVERLAP
@OTHERS
@pytest.mark.parametrize("have", [1, 8, 9, 40, 49])
def test_the_rest_of_the_stream_follows(have, others, overlap):
    request = Arrival(0, "A", 40, 50).request()
    engine = make_engine(overlap=overlap, **others)
    whole = script(engine, request, 50)
    engine.submit(resumed(request, c0=whole[:have]))
    events = finish(engine)
    streamed = [token for event in events for token in event.token_ids.tolist()]
    assert streamed == whole[have:]
    record = engine.records["A"]
    assert made_by(engine, request) == whole[have:]
    assert len(record.choices[0].times_s) == 50 - have
    assert (record.prompt_tokens, record.finish_reason) == (40, "length")
    check_idle(engine)


@OVERLAP
def test_choices_go_on_each_from_its_own_output(overlap):
    request = Arrival(0, "A", 20, 30, params={"n": 4}).request()
    engine = make_engine(overlap=overlap)
    streams = [script(engine, request, 30, choice) for choice in range(4)]
    # Choice 2 has ended elsewhere, choice 3 has no token yet.
    engine.submit(resumed(request, c0=streams[0][:5], c1=streams[1][:17], c3=[]))
    finish(engine)
    rest = [made_by(engine, request, choice) for choice in range(4)]
    assert rest == [streams[0][5:], streams[1][17:], [], streams[3]]
    check_idle(engine)


def test_policies_see_its_output_as_generated():
    engine = make_engine()
    request = Arrival(0, "A", 20, 30).request()
    engine.submit(resumed(request, c0=script(engine, request, 12)))
    engine.step()
    view = engine.state.table.view(engine.state.running)
    facts = view.prompt, view.generated, view.computed, view.max_output
    assert [int(fact[0]) for fact in facts] == [20, 12 + 1, 32, 30]


@OVERLAP
def test_minimum_tokens_count_from_the_beginning(overlap):
    # Every token of the vocabulary but one ends a stream: masked before min_tokens, at once after.
    ends = tuple(range(1, VOCAB))
    request = Arrival(0, "A", 10, 20, params={"min_tokens": 6, "ignore_eos": False}).request()
    engine = make_engine(overlap=overlap, end_token_ids=ends)
    whole = script(engine, request, 7)
    assert whole[:6] == [0] * 6
    assert whole[6] != 0
    engine.submit(resumed(request, c0=whole[:4]))
    finish(engine)
    assert made_by(engine, request) == whole[4:7]
    assert engine.records["A"].finish_reason == "stop"


def test_a_preempted_one_still_ends_with_its_stream():
    engine = make_engine(pages=10)
    requests = [Arrival(0, name, 30, 60).request() for name in "ABC"]
    for request in requests:
        engine.submit(resumed(request, c0=script(engine, request, 60)[:20]))
    finish(engine)
    for request in requests:
        assert made_by(engine, request) == script(engine, request, 60)[20:]
    assert sum(record.preemptions for record in engine.records.values()) > 0
    check_idle(engine)


def test_pages_of_output_are_found_in_the_cache():
    engine = make_engine()
    first = Arrival(0, "A", 20, 30, params={"seed": 5}).request()
    engine.submit(first)
    finish(engine)
    whole = script(engine, first, 30)
    again = dataclasses.replace(first, request_id="B")
    engine.submit(resumed(again, c0=whole[:29]))
    finish(engine)
    # All pages of the 49 known tokens that the first one filled: 48 tokens, one left to compute.
    assert engine.records["B"].computed_tokens == 1


def test_one_that_outgrew_the_pool_ends_at_once():
    engine = make_engine(pages=4)
    engine.submit(resumed(Arrival(0, "A", 40, 60).request(), c0=[1] * 30))
    finish(engine)
    assert engine.records["A"].finish_reason == "capacity"
    assert "needs 5 pages (80 tokens)" in engine.records["A"].error
    check_idle(engine)


def test_contiguous_memory_reserves_from_prompt_to_limit():
    engine = make_engine(allocator=Contiguous(4), cache=NoCache(), pages=4, max_model_len=64)
    request = Arrival(0, "A", 20, 30).request()
    engine.submit(resumed(request, c0=script(engine, request, 30)[:20]))
    finish(engine)
    assert made_by(engine, request) == script(engine, request, 30)[20:]


def test_output_outside_the_vocabulary_is_refused():
    engine = make_engine(executor=Fake(vocab_size=VOCAB, max_model_len=LONGEST))
    with pytest.raises(RequestError, match=r"resumed of request 'A' must hold .* got 1000"):
        engine.submit(resumed(Arrival(0, "A", 20, 30).request(), c0=[5, VOCAB]))
