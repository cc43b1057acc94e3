"""Lengths: of prompts and outputs, against the pool and the model."""

import numpy as np
import pytest

from core.errors import ConfigError, RequestError
from core.request import Request
from tests.engine_harness import Arrival, check_alive, make_engine, run

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def test_zero_length_prompt_is_refused_on_construction():
    with pytest.raises(RequestError, match=r"prompt of request 'A' must hold >= 1 token, got 0"):
        Request("A", np.empty(0, np.int32))


@OVERLAP
def test_max_tokens_0_ends_at_once_without_a_launch(overlap):
    engine = make_engine(overlap=overlap)
    out = run(engine, [Arrival(0, "A", 10, 0)])
    assert out.reason("A") == "length"
    assert out.tokens("A") == []
    assert engine.executor.num_launches == 0
    check_alive(engine)


@OVERLAP
def test_max_tokens_0_with_prompt_logprobs_computes_the_prompt_and_samples_nothing(overlap):
    engine = make_engine(budget=16, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 40, 0, params={"prompt_logprobs": 0})])
    assert out.reason("A") == "length"
    assert out.tokens("A") == []
    assert len(out.records["A"].prompt_logprobs) == 39
    assert out.records["A"].computed_tokens == 40


@OVERLAP
def test_max_tokens_1_ends_with_the_prefill(overlap):
    engine = make_engine(overlap=overlap)
    out = run(engine, [Arrival(0, "A", 40, 1)])
    assert len(out.tokens("A")) == 1
    assert out.records["A"].computed_tokens == 40


@OVERLAP
@pytest.mark.parametrize("max_tokens", [2**31 - 1, 2**31, 10**12])
def test_huge_max_tokens_is_bounded_by_the_models_length(max_tokens, overlap):
    engine = make_engine(max_model_len=64, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 10, max_tokens), Arrival(0, "B", 10, 5)])
    assert out.reason("A") == "length"
    assert len(out.tokens("A")) == 54
    assert out.first_token_step("B") == 0, "a limit nobody can reach must not reserve memory"


@OVERLAP
def test_prompt_that_exactly_fills_the_pool_gets_its_one_token(overlap):
    engine = make_engine(pages=4, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 64, 1)])
    assert out.reason("A") == "length"
    assert len(out.tokens("A")) == 1
    check_alive(engine)


@OVERLAP
def test_prompt_that_exactly_fills_the_pool_is_ended_when_it_must_grow(overlap):
    engine = make_engine(pages=4, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 64, 2)])
    assert out.reason("A") == "capacity"
    assert len(out.tokens("A")) == 1
    check_alive(engine)


def test_prompt_one_token_above_the_pool_fails_naming_need_and_capacity():
    engine = make_engine(pages=4)
    out = run(engine, [Arrival(0, "A", 65, 1)])
    assert out.reason("A") == "capacity"
    assert out.records["A"].error == (
        "request 'A' needs 5 pages (80 tokens) at once, the pool holds 4 pages (64 tokens)"
    )
    assert out.records["A"].admitted_s is None


def test_prompt_one_token_too_long_for_the_model_fails_naming_the_limit():
    engine = make_engine(pages=16, max_model_len=32)
    out = run(engine, [Arrival(0, "A", 32, 1), Arrival(0, "B", 31, 5)])
    assert out.reason("A") == "capacity"
    assert "max_model_len = 32 tokens, got 32" in out.records["A"].error
    assert out.reason("B") == "length"
    assert len(out.tokens("B")) == 1


@OVERLAP
def test_max_model_len_ends_a_request_with_length(overlap):
    engine = make_engine(pages=16, max_model_len=40, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 30, 100)])
    assert out.reason("A") == "length"
    assert len(out.tokens("A")) == 10


@OVERLAP
def test_engine_max_model_len_below_the_models_counts(overlap):
    engine = make_engine(max_model_len=64, engine_len=24, overlap=overlap)
    out = run(engine, [Arrival(0, "A", 20, 100), Arrival(0, "B", 24, 1)])
    assert [out.reason("A"), out.reason("B")] == ["length", "capacity"]
    assert len(out.tokens("A")) == 4


def test_engine_max_model_len_above_the_models_is_refused():
    text = r"engine\.max_model_len must be <= the model's 32, got 33"
    with pytest.raises(ConfigError, match=text):
        make_engine(max_model_len=32, engine_len=33)
