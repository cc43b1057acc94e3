"""max_tokens_share: a fixed share of the limit, and no more is known."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.predictor.max_tokens_share import MaxTokensShare


def request(**params):
    return Request("A", np.ones(3, np.int32), SamplingParams(**params), forced_output=2)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 20.0), (0.25, 10.0), (1.0, 40.0)])
def test_share_of_the_limit(share, expected):
    assert MaxTokensShare(share).predict(request(max_tokens=40)) == expected


def test_request_that_ignores_end_tokens_is_expected_to_reach_its_limit():
    assert MaxTokensShare(0.5).predict(request(max_tokens=40, ignore_eos=True)) == 40.0


def test_true_length_is_not_looked_at():
    assert MaxTokensShare(0.5).predict(request(max_tokens=40)) != 2


def test_predictor_keeps_nothing():
    plugin = MaxTokensShare()
    built = plugin.build_length_predictor(None)
    before = vars(built).copy()
    built.observe(None)
    assert vars(built) == before


@pytest.mark.parametrize("share", [0, -0.5, 1.01])
def test_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match=r"share must be in \(0, 1\], got "):
        MaxTokensShare(share)
