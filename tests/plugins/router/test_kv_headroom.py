"""kv_headroom: free + evictable - promised - this request's uncached need, worked out by hand."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.router.kv_headroom import KvHeadroom
from tests.plugins.router.route_tables import query

A = {"pages_free": 10, "pages_evictable": 5, "pages_promised": 3}
B = {"pages_free": 20, "pages_evictable": 0, "pages_promised": 5}


def test_most_headroom_takes_it():
    """100 prompt and 28 output tokens need 8 pages of 16: 4 pages are left at a, 7 at b."""
    decision = KvHeadroom().decide_route(query(A, B))
    assert decision.replica == "b"
    assert decision.scores.tolist() == [64.0, 112.0]


def test_a_cached_prefix_counts_as_room():
    decision = KvHeadroom().decide_route(query(A, B, cached=[64, 0]))
    assert decision.replica == "a"
    assert decision.scores.tolist() == [128.0, 112.0]


def test_oversold_memory_still_tells_replicas_apart():
    decision = KvHeadroom().decide_route(query(A | {"pages_promised": 50}, B | {"pages_free": 0}))
    assert decision.scores.tolist() == [(15 - 50 - 8) * 16, (0 - 5 - 8) * 16]
    assert decision.replica == "b"


def test_among_equals_fewer_requests_then_the_first():
    assert KvHeadroom().decide_route(query(A | {"requests": 2}, A | {"requests": 1})).replica == "b"
    assert KvHeadroom().decide_route(query(A, A)).replica == "a"


def test_a_hot_replica_goes_last_and_is_still_used():
    hot = {"temperature_c": 90.0}
    rule = KvHeadroom(hot_c=85.0)
    assert rule.decide_route(query(A, B | hot)).replica == "a"
    both = rule.decide_route(query(A | hot, B | hot))
    assert (both.replica, both.reason) == ("b", "most KV headroom, though hot")
    assert rule.decide_route(query(A, B | {"temperature_c": np.nan})).replica == "b"


def test_pages_of_different_sizes_are_compared_in_tokens():
    small = {"pages_free": 30, "page_size": 4}
    large = {"pages_free": 16, "page_size": 16}
    decision = KvHeadroom().decide_route(query(small, large))
    assert decision.scores.tolist() == [(30 - 32) * 4, (16 - 8) * 16]


def test_bad_temperature_is_refused():
    with pytest.raises(ConfigError, match="hot_c must be > 0, got 0"):
        KvHeadroom(hot_c=0)
