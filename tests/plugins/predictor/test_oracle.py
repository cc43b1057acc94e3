"""oracle: the true length, or an error that says why there is none."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.predictor.oracle import Oracle


def request(forced=None, **params):
    return Request("A", np.ones(3, np.int32), SamplingParams(**params), forced_output=forced)


def test_forced_length_within_the_limit_is_the_truth():
    assert Oracle().predict(request(7, max_tokens=40)) == 7.0
    assert Oracle().predict(request(70, max_tokens=40)) == 40.0
    assert Oracle().predict(request(7, max_tokens=40, stop_token_ids=(3,))) == 7.0


def test_request_that_ignores_end_tokens_reaches_its_limit():
    assert Oracle().predict(request(max_tokens=40, ignore_eos=True)) == 40.0


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True, "stop_token_ids": (3,)}])
def test_length_that_nobody_knows_is_refused(params):
    with pytest.raises(ConfigError, match="forced_output of request 'A' must be given"):
        Oracle().predict(request(max_tokens=40, **params))


def test_it_says_what_it_is():
    assert Oracle.oracle is True
