"""conf/bisection.py: the search for the highest rate that meets."""

import math

import pytest

from conf.bisection import Search
from core.errors import ConfigError


def found(search: Search, capacity: float) -> list[float]:
    """The rates tried where whatever is at most `capacity` meets."""
    rates = []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.tell(rate, rate <= capacity)
    return rates


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.3, 9.99, 16.0, 250.0])
def test_it_ends_within_the_tolerance_of_the_capacity(capacity):
    search = Search(low=1, high=16, tolerance=0.05, max_probes=40)
    found(search, capacity)
    assert search.settled
    assert search.meets <= capacity < search.fails <= 1.051 * search.meets


def test_ends_are_tried_first_and_then_the_geometric_middle():
    assert found(Search(low=1, high=16, tolerance=0.3), 5)[:4] == [1.0, 16.0, 4.0, 8.0]


def test_bracket_grows_upwards_and_downwards():
    assert found(Search(low=1, high=4, tolerance=1.0), 20) == [1.0, 4.0, 8.0, 16.0, 32.0]
    assert found(Search(low=8, high=16, tolerance=1.0), 1.5) == [8.0, 4.0, 2.0, 1.0]


def test_rates_have_three_digits_so_that_the_next_try_finds_the_same_folders():
    rates = found(Search(low=1, high=16, tolerance=0.01), 6.789)
    assert all(rate == float(f"{rate:.3g}") for rate in rates)


def test_it_ends_when_three_digits_part_the_bracket_no_more():
    search = Search(low=1, high=2, tolerance=1e-9, max_probes=100)
    found(search, 1.234)
    assert (search.meets, search.fails) == (1.23, 1.24)


def test_it_gives_up_after_max_probes():
    search = Search(low=1, high=2, max_probes=5)
    assert len(found(search, 1e9)) == 5
    assert (search.meets, search.fails, search.settled) == (16.0, None, False)


def test_nothing_meets():
    search = Search(low=1, high=2, max_probes=3)
    found(search, 0.0)
    assert (search.meets, search.fails, search.settled) == (None, 0.25, False)


def test_a_rate_that_meets_above_one_that_fails_does_not_count():
    search = Search(low=1, high=16)
    for rate, met in ((1, True), (4, False), (8, True)):
        search.tell(rate, met)
    assert (search.meets, search.fails) == (1, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low": 0}, "hydra.sweeper.low must be > 0, got 0"),
        ({"low": 4, "high": 4}, r"hydra.sweeper.high must be above hydra.sweeper.low \(4\), got 4"),
        ({"high": math.inf}, "hydra.sweeper.high must be above"),
        ({"tolerance": 0}, "hydra.sweeper.tolerance must be > 0, got 0"),
        ({"max_probes": 1}, "hydra.sweeper.max_probes must be >= 2, got 1"),
    ],
)
def test_bad_limits_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Search(**values)
