"""Replicas as one machine: so many times as fast, and as large."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.step_time.pooled import Pooled
from plugins.step_time.roofline import Roofline


def test_every_step_takes_its_share_of_the_time():
    one = Roofline()
    pooled = Pooled(one, replicas=8)
    facts = (3, 700, 5000, 90000)
    assert pooled.seconds(*facts) == one.seconds(*facts) / 8
    many = np.arange(1, 5), np.arange(1, 5), 1000 * np.arange(1, 5), 1000 * np.arange(1, 5)
    assert pooled.seconds(*many).tolist() == (one.seconds(*many) / 8).tolist()


def test_its_memory_is_that_of_all_and_it_says_what_it_is():
    pooled = Pooled(Roofline(), replicas=8)
    assert pooled.pool_tokens(0.9) == 8 * Roofline().pool_tokens(0.9)
    described = pooled.describe()
    assert (described["pooled"], described["source"], described["error"]) == (8, "roofline", None)


def test_bad_values_are_refused():
    with pytest.raises(ConfigError, match=r"step_time\.replicas must be >= 1, got 0"):
        Pooled(Roofline(), replicas=0)
    with pytest.raises(ConfigError, match=r"step_time\.of must be a model with a method seconds"):
        Pooled(None)
