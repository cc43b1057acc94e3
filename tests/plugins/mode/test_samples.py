"""Percentiles of samples: exact while they fit, within a bin's width beyond."""

import numpy as np
import pytest

from plugins.mode import samples
from plugins.mode.samples import Distribution, distribution


@pytest.fixture
def drawn():
    return np.random.default_rng(0).lognormal(-4, 1.5, 20_000)


def of(values, parts):
    one = Distribution()
    for part in np.array_split(values, parts):
        one.add(part)
    return one.summary()


def test_few_samples_are_exact(drawn):
    assert of(drawn, 7) == distribution(drawn.tolist())


@pytest.mark.parametrize("parts", [1, 10, 3000])
def test_many_are_within_a_bin(drawn, parts, monkeypatch):
    monkeypatch.setattr(samples, "EXACT", 1000)
    found, exact = of(drawn, parts), distribution(drawn)
    assert (found["count"], found["max"]) == (exact["count"], exact["max"])
    assert found["mean"] == pytest.approx(exact["mean"])
    for name in ("p50", "p90", "p99"):
        assert found[name] == pytest.approx(exact[name], rel=2e-3)


def test_zeros_and_giants_have_a_bin(monkeypatch):
    monkeypatch.setattr(samples, "EXACT", 10)
    found = of(np.array([0.0] * 60 + [1e9] * 40), 100)
    assert found["p50"] == pytest.approx(samples.LEAST_S, rel=1e-3)
    assert found["p99"] == pytest.approx(samples.MOST_S, rel=1e-3)
    assert found["max"] == 1e9


def test_nothing_gives_none():
    assert Distribution().summary() == distribution([]) == distribution(np.empty(0))
    assert Distribution().summary()["p99"] is None
