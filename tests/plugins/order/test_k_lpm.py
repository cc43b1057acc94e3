"""k_lpm: the oldest, then k - 1 by cached prefix, round by round."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.order.k_lpm import KLpm
from tests.core.policy_tables import table_of
from tests.plugins.order.order_tables import order_query

ARRIVALS = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
CACHED = [0, 16, 0, 64, 32, 48]  # by cached prefix: 3, 5, 4, 1, 0, 2


def order(policy, view, cached, step=0):
    keys = policy.decide_order(order_query(view, cached=cached, step=step)).keys
    return np.argsort(keys).tolist()


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [0, 1, 2, 3, 4, 5]),
        (2, [0, 3, 1, 5, 2, 4]),
        (3, [0, 3, 5, 1, 4, 2]),
        (99, [0, 3, 5, 4, 1, 2]),
    ],
)
def test_rounds_begin_with_the_oldest_and_go_on_by_cached_prefix(k, expected):
    assert order(KLpm(k), table_of(arrival_s=ARRIVALS), CACHED) == expected


def test_a_round_goes_on_with_those_that_left_the_queue():
    policy, view = KLpm(3), table_of(arrival_s=ARRIVALS)
    assert order(policy, view, CACHED) == [0, 3, 5, 1, 4, 2]
    rest = view._table.view(view._slots[[1, 2, 4, 5]])  # 0 and 3 started
    assert order(policy, rest, [16, 0, 32, 48], step=1) == [3, 0, 2, 1]  # rows of 5, 1, 4, 2
    assert order(policy, rest, [16, 0, 32, 48], step=2) == [3, 0, 2, 1]  # nobody left


def test_matches_beyond_the_window_do_not_count():
    view = table_of(arrival_s=ARRIVALS)
    assert order(KLpm(3, window=3), view, CACHED) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("field", ["k", "window"])
def test_values_below_one_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field} must be >= 1, got 0"):
        KLpm(**{field: 0})
