"""dfs_weight: subtree by subtree, the heavier first."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.request import Request
from plugins.order.dfs_weight import DfsWeight
from plugins.order.fcfs import Fcfs
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def order(policy, prompts, **fields):
    asked = [Request(f"r{i}", np.array(one, np.int32), **fields) for i, one in enumerate(prompts)]
    view = table_of(arrival_s=[float(i) for i in range(len(prompts))])
    return np.argsort(policy.decide_order(order_query(view, requests=asked)).keys).tolist()


def test_heavier_subtree_first_and_a_node_s_own_requests_after_its_children():
    prompts = [
        [1, 1, 9],  # 0: below 1
        [2, 5],  # 1: ends at 2 5
        [2, 5, 7],  # 2
        [2, 6],  # 3
        [2, 5, 8],  # 4
        [1, 2, 9],  # 5
        [2],  # 6: ends at 2
        [300],  # 7: alone
    ]
    # Under 2 are five, under 1 two; in 2 the subtree 2 5 has three, and itself ends one.
    assert order(DfsWeight(min_tokens=1), prompts) == [2, 4, 1, 3, 6, 0, 5, 7]


def test_equal_prompts_stay_together_by_arrival():
    prompts = [[1, 2, 3], [4, 4, 4], [1, 2, 3], [1, 2, 3]]
    assert order(DfsWeight(min_tokens=2), prompts) == [0, 2, 3, 1]


def test_tokens_compare_as_numbers():
    """256 is smaller than 2 byte by byte on most machines; here only equality may count."""
    prompts = [[256, 1], [2, 1], [256, 2], [2, 2], [2, 3]]
    assert order(DfsWeight(min_tokens=1), prompts) == [1, 3, 4, 0, 2]


def test_short_common_prefixes_do_not_count():
    prompts = [[9, 9, 9], [1, 2, 3], [1, 2, 4]]
    assert order(DfsWeight(min_tokens=2), prompts) == [1, 2, 0]
    assert order(DfsWeight(min_tokens=3), prompts) == [0, 1, 2]


def test_requests_that_keep_out_of_the_cache_form_no_tree():
    prompts = [[9, 9, 9], [1, 2, 3], [1, 2, 4]]
    assert order(DfsWeight(min_tokens=2), prompts, cache=False) == [0, 1, 2]


def test_those_beyond_the_window_follow_by_arrival():
    prompts = [[9, 9], [1, 2], [5, 5], [1, 2]]
    assert order(DfsWeight(min_tokens=2), prompts) == [1, 3, 0, 2]
    assert order(DfsWeight(min_tokens=2, window=3), prompts) == [0, 1, 2, 3]


def test_the_walk_stands_until_somebody_new_waits():
    """Three below A, two below B. When two of A have started, B is heavier: it still waits."""
    asked = [Request(f"r{i}", np.array(one, np.int32)) for i, one in enumerate([[1], [2]] * 2)]
    asked.append(Request("r4", np.array([1], np.int32)))
    policy, view = DfsWeight(min_tokens=1), table_of(arrival_s=[0.0, 1.0, 2.0, 3.0, 4.0])
    keys = policy.decide_order(order_query(view, requests=asked)).keys
    assert np.argsort(keys).tolist() == [0, 2, 4, 1, 3]

    def later(rows):
        rest = view._table.view(view._slots[rows])
        query = order_query(rest, requests=[asked[row] for row in rows])
        return [rows[i] for i in np.argsort(policy.decide_order(query).keys)]

    assert later([1, 3, 4]) == [4, 1, 3]
    policy = DfsWeight(min_tokens=1)
    assert later([1, 3, 4]) == [1, 3, 4]


def test_a_batch_known_in_advance_computes_each_prefix_once_in_a_small_cache():
    """Theorem 3.1: optimal hits with a cache that holds the longest request."""
    arrivals = [
        Arrival(0, f"r{i}", 72, 2, shares=(f"base{i % 3}", 64), fields={"arrival_s": i / 100})
        for i in range(12)
    ]

    def cached(policy):
        out = run(make_engine(pages=6, seqs=1, plugins={"mine": policy}), arrivals)
        return sum(record.cached_tokens for record in out.records.values())

    assert cached(Fcfs()) == 0
    assert cached(DfsWeight()) == (12 - 3) * 64


def test_a_chain_of_a_thousand_prompts_is_no_trouble():
    prompts = [list(range(1, 2 + i)) for i in range(1000)]
    assert order(DfsWeight(min_tokens=1, window=1000), prompts) == list(range(999, -1, -1))


@pytest.mark.parametrize("field", ["min_tokens", "window"])
def test_values_below_one_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field} must be >= 1, got 0"):
        DfsWeight(**{field: 0})
