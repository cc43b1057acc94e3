"""What a request may ask: the bounds of SamplingParams and Request, and the words of refusals."""

import math

import numpy as np
import pytest

from core.errors import RequestError
from core.request import Request, SamplingParams

BOUNDED = {
    "max_tokens": (0, None),
    "temperature": (0, 100),
    "top_k": (0, None),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "logprobs": (0, None),
    "prompt_logprobs": (0, None),
    "n": (1, None),
    "seed": (-(2**63), 2**63 - 1),
}
WHOLE = {"max_tokens", "top_k", "logprobs", "prompt_logprobs", "n", "seed"}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_are_inclusive(name):
    for bound in BOUNDED[name]:
        if bound is not None:
            assert getattr(SamplingParams(**{name: bound}), name) == bound


@pytest.mark.parametrize("name", BOUNDED)
def test_value_beyond_a_bound_is_refused_with_field_rule_and_value(name):
    low, high = BOUNDED[name]
    step = 1 if name in WHOLE else 0.5
    rule = rf"must be >= {low}" if high is None else rf"must be in \[{low}, {high}\]"
    for value in [low - step] + ([] if high is None else [high + step]):
        with pytest.raises(RequestError, match=rf"^{name} {rule}, got {value!r}$"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_no_number_is_refused(name, value):
    with pytest.raises(RequestError, match=f"^{name} must be "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_repetition_penalty_must_be_positive(value):
    with pytest.raises(RequestError, match=r"^repetition_penalty must be >"):
        SamplingParams(repetition_penalty=value)


def test_min_tokens_must_not_exceed_max_tokens():
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match=r"min_tokens must be <= max_tokens \(5\), got 6"):
        SamplingParams(max_tokens=5, min_tokens=6)
    with pytest.raises(RequestError, match="min_tokens must be >= 0, got -1"):
        SamplingParams(min_tokens=-1)


@pytest.mark.parametrize("bias", [{-1: 1.0}, {3: math.nan}, {3: math.inf}])
def test_logit_bias_must_map_token_ids_to_finite_numbers(bias):
    with pytest.raises(RequestError, match="logit_bias must map ids >= 0 to finite numbers"):
        SamplingParams(logit_bias=bias)


def test_stop_token_ids_must_not_be_negative():
    with pytest.raises(RequestError, match=r"stop_token_ids must be >= 0, got \(4, -2\)"):
        SamplingParams(stop_token_ids=(4, -2))


def test_defaults_mask_nothing():
    params = SamplingParams()
    off = (params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    assert off == (0, 1.0, 0.0, 1.0)
    assert (params.seed, params.n, params.logprobs) == (None, 1, None)


def ask(**fields):
    return Request("A", np.ones(3, np.int32), **fields)


@pytest.mark.parametrize("value", [0, -1])
def test_forced_output_must_be_positive(value):
    with pytest.raises(RequestError, match=f"forced_output must be >= 1, got {value}"):
        ask(forced_output=value)


@pytest.mark.parametrize("value", [-(2**31) - 1, 2**31])
def test_priority_must_fit_its_column(value):
    assert ask(priority=2**31 - 1).priority == 2**31 - 1
    with pytest.raises(
        RequestError, match=rf"priority must be in \[-2\*\*31, 2\*\*31\), got {value}"
    ):
        ask(priority=value)


@pytest.mark.parametrize(
    ("max_tokens", "forced", "limit"), [(10, None, 10), (10, 4, 4), (10, 40, 10), (0, None, 0)]
)
def test_output_limit_is_the_smaller_of_forced_and_asked(max_tokens, forced, limit):
    request = ask(params=SamplingParams(max_tokens=max_tokens), forced_output=forced)
    assert request.output_limit == limit


def test_requests_compare_by_identity():
    """A prompt is an array: comparing by value would be neither cheap nor meant."""
    assert ask() != ask()
