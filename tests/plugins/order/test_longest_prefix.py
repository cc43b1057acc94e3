"""longest_prefix: what the cache holds goes first; of twins only the first keeps its place."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import Hold
from core.request import Request, SamplingParams
from plugins.cache.lru import Lru
from plugins.order.fcfs import Fcfs
from plugins.order.longest_prefix import LongestPrefix
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def request(name, tokens, **fields):
    return Request(name, np.array(tokens, np.int32), **fields)


def order(policy, view, **facts):
    decision = policy.decide_order(order_query(view, **facts))
    assert decision.hold is Hold.STEP
    keys = np.asarray(decision.keys)
    return np.lexsort(keys.T[::-1]).tolist()


def test_most_cached_tokens_first_then_arrival():
    view = table_of(arrival_s=[0.0, 1.0, 2.0, 3.0])
    assert order(LongestPrefix(), view, cached=[0, 64, 128, 64]) == [2, 1, 3, 0]


def twins(count, **fields):
    """Requests that share 4 tokens and differ in the fifth."""
    return [request(f"r{i}", [1, 2, 3, 4, 10 + i], **fields) for i in range(count)]


def test_twins_of_an_earlier_request_go_last_by_arrival():
    view = table_of(arrival_s=[3.0, 1.0, 2.0, 4.0])
    asked = [*twins(3), request("other", [9, 9, 9, 9, 9])]
    assert order(LongestPrefix(twin_tokens=4), view, requests=asked) == [1, 3, 2, 0]
    assert order(LongestPrefix(twin_tokens=5), view, requests=asked) == [1, 2, 0, 3]


def test_a_request_that_finds_more_in_the_cache_is_no_twin():
    view = table_of(arrival_s=[0.0, 1.0, 2.0])
    assert order(LongestPrefix(4), view, requests=twins(3), cached=[0, 5, 4]) == [1, 0, 2]


@pytest.mark.parametrize(
    "fields",
    [{"cache": False}, {"namespace": "other"}, {"params": SamplingParams(prompt_logprobs=1)}],
)
def test_who_cannot_share_is_no_twin(fields):
    view = table_of(arrival_s=[0.0, 1.0, 2.0])
    asked = [twins(1)[0], twins(2, **fields)[1], request("other", [9] * 5)]
    assert order(LongestPrefix(4), view, requests=asked) == [0, 1, 2]


def test_a_long_queue_is_served_by_arrival_without_a_look_at_the_cache():
    view = table_of(arrival_s=[2.0, 1.0, 0.0])
    query = order_query(view, cached=[64, 0, 0])
    assert order(LongestPrefix(max_waiting=3), view, cached=[64, 0, 0])[0] == 0
    keys = np.asarray(LongestPrefix(max_waiting=2).decide_order(query).keys)
    assert np.lexsort(keys.T[::-1]).tolist() == [2, 1, 0]


def test_it_finds_more_in_a_small_cache_than_first_come_first_served():
    """Two prefixes of 4 pages by turns, one slot and room for little more than one of them."""
    arrivals = [
        Arrival(0, f"r{i}", 72, 2, shares=(f"base{i % 2}", 64), fields={"arrival_s": i / 100})
        for i in range(8)
    ]

    def cached(policy):
        engine = make_engine(pages=6, seqs=1, evictor=Lru(), plugins={"mine": policy})
        out = run(engine, arrivals)
        return sum(record.cached_tokens for record in out.records.values())

    assert cached(LongestPrefix()) == 6 * 64
    assert cached(Fcfs()) <= 2 * 64


@pytest.mark.parametrize("field", ["twin_tokens", "max_waiting"])
def test_values_below_one_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field} must be >= 1, got 0"):
        LongestPrefix(**{field: 0})
