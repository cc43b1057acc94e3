"""Requests whose logits hold no token (N17): they end with an error, and nobody else notices."""

import numpy as np
import pytest

from core.keys import page_keys
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import summarise
from tests.engine_harness import VOCAB, Arrival, check_alive, make_engine, run

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
SEED = 1  # of the request that fails


def failing_engine(position, overlap, **options):
    """Requests of that seed have no logits at this output position."""
    fake = Fake(vocab_size=VOCAB, max_model_len=1024, fail_at={SEED: position})
    return make_engine(executor=fake, overlap=overlap, **options)


def cached_pages(engine, tokens):
    tokens = np.array(tokens, np.int32)
    keys = page_keys(tokens, 16)
    return len(engine.state.memory.cache.match(keys, tokens[: len(keys) * 16], "").pages)


@OVERLAP
@pytest.mark.parametrize("cache", [Radix, NoCache])
@pytest.mark.parametrize(
    ("prompt", "position", "output"), [(40, 0, 8), (40, 0, 1), (200, 0, 8), (40, 20, 40)]
)
def test_the_request_ends_with_an_error_and_leaves_nothing(
    prompt, position, output, cache, overlap
):
    engine = failing_engine(position, overlap, pages=32, cache=cache())
    asks = {"seed": SEED, "logprobs": 2}
    out = run(engine, [Arrival(0, "A", prompt, output, params=asks), Arrival(0, "B", 30, 50)])
    place = f"request 'A' at position {prompt + position}: "
    assert out.reason("A") == out.records["A"].choices[0].finish_reason == "error"
    assert out.records["A"].error == place + "logits are not finite"
    assert len(out.tokens("A")) == len(out.records["A"].choices[0].logprobs) == position
    assert [c.reason for c in out.choices("finished", "A")] == [out.records["A"].error]
    assert len(out.tokens("B")) == 50
    known = [*out.requests["A"].prompt, *out.tokens("A")]
    assert cached_pages(engine, known) == 0
    assert engine.state.finish_counts == {"error": 1, "length": 1}
    check_alive(engine)


@OVERLAP
def test_the_summary_counts_it(overlap):
    engine = failing_engine(3, overlap)
    out = run(engine, [Arrival(0, "A", 40, 9, params={"seed": SEED}), Arrival(0, "B", 20, 5)])
    requests = summarise(out.records.values(), StepTotals(16, 16))["requests"]
    assert requests["finish_reasons"]["error"] == requests["finish_reasons"]["length"] == 1
    assert requests["first_error"] == out.records["A"].error
    assert (requests["accepted"], requests["completed"], requests["unfinished"]) == (2, 1, 0)


@OVERLAP
def test_all_choices_end_with_the_one_that_failed(overlap):
    engine = failing_engine(5, overlap, pages=32)
    out = run(engine, [Arrival(0, "A", 40, 30, params={"seed": SEED, "n": 3})])
    record = out.records["A"]
    assert [choice.finish_reason for choice in record.choices] == ["error"] * 3
    assert all(len(choice.token_ids) <= 5 for choice in record.choices)
    assert engine.state.finish_counts == {"error": 1}
    assert engine.state.memory.cache.num_pages == 0


@OVERLAP
def test_a_prefix_that_another_request_uses_stays(overlap):
    engine = failing_engine(10, overlap, pages=32)
    failing = Arrival(2, "A", 60, 30, ("B", 32), params={"seed": SEED})
    out = run(engine, [Arrival(0, "B", 40, 50), failing])
    assert out.reason("A") == "error"
    assert out.records["A"].cached_tokens == 32
    assert out.reason("B") == "length"
    assert cached_pages(engine, out.requests["A"].prompt) == 2


@OVERLAP
def test_a_shared_prefix_goes_with_the_last_that_failed(overlap):
    engine = failing_engine(4, overlap, pages=32)
    params = {"seed": SEED}
    arrivals = [Arrival(i, name, 60, 9, ("A", 48), params) for i, name in enumerate("ABC")]
    out = run(engine, arrivals)
    assert {record.finish_reason for record in out.records.values()} == {"error"}
    assert engine.state.memory.cache.num_pages == 0


@OVERLAP
def test_it_fails_also_when_preempted_meanwhile(overlap):
    """Eight requests in a pool for three, half of which fail in the middle."""
    engine = failing_engine(12, overlap, pages=8)
    arrivals = [
        Arrival(0, f"r{i}", 22, 30, params={"seed": SEED if i % 2 else 9}) for i in range(8)
    ]
    out = run(engine, arrivals)
    assert out.preemptions() > 0
    for index in range(8):
        wanted = ("error", 12) if index % 2 else ("length", 30)
        assert (out.reason(f"r{index}"), len(out.tokens(f"r{index}"))) == wanted
