"""experiments/paper/intervals.py against tables."""

import numpy as np
import pytest

from experiments.paper.intervals import Interval, over_requests, over_seeds, t_cdf, t_quantile


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)],
)
def test_t_quantile_is_that_of_the_tables(freedom, value):
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("freedom", [1, 2, 7, 8])
def test_t_cdf_is_a_half_at_zero_and_grows_to_one(freedom):
    assert t_cdf(0.0, freedom) == 0.5
    assert t_cdf(1e6, freedom) == pytest.approx(1.0, abs=1e-6)


def test_interval_over_seeds_is_mean_and_t_times_standard_error():
    found = over_seeds([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), error sqrt(0.5)
    assert found.mean == 3.0
    assert found.high == pytest.approx(3 + 2.7764 * np.sqrt(0.5), abs=1e-3)
    assert found.low == pytest.approx(3 - 2.7764 * np.sqrt(0.5), abs=1e-3)
    assert (found.count, found.method) == (5, "t over 5 seeds")


def test_one_seed_has_no_interval():
    assert over_seeds([2.0]) == Interval(2.0, None, None, 1)
    assert not over_seeds([2.0]).clear


def test_interval_is_clear_when_zero_lies_outside():
    assert Interval(2, 1, 3, 5).clear
    assert not Interval(2, -1, 3, 5).clear


def test_bootstrap_of_a_mean_has_its_standard_error_and_says_so():
    values = np.random.default_rng(1).normal(10, 2, 400)
    found = over_requests(values.mean(), lambda counts: float(counts @ values) / 400, 400)
    assert found.low is not None
    assert found.high is not None
    half = (found.high - found.low) / 2
    assert half == pytest.approx(1.96 * values.std() / 20, rel=0.1)
    assert found.low < values.mean() < found.high
    assert found.method == "bootstrap over 400 requests of one seed"


def test_bootstrap_is_the_same_each_time():
    def statistic(counts):
        return float(counts @ np.arange(10))

    assert over_requests(45, statistic, 10) == over_requests(45, statistic, 10)
