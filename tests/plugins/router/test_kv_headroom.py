"""kv_headroom: (free + evictable) / (promised + its uncached need), worked out by hand."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.router.kv_headroom import KvHeadroom
from tests.plugins.router.route_tables import query

A = {"pages_free": 10, "pages_evictable": 5, "pages_promised": 3}
B = {"pages_free": 20, "pages_evictable": 0, "pages_promised": 5}


def test_most_headroom_takes_it():
    """100 prompt and 28 output tokens need 8 pages of 16: 15 pages for 3 + 8, 20 for 5 + 8."""
    decision = KvHeadroom().decide_route(query(A, B))
    assert decision.replica == "b"
    assert decision.scores.tolist() == [15 / 11, 20 / 13]


def test_a_cached_prefix_is_not_needed():
    """64 of 8 * 16 tokens: 15 pages for 3 + 4."""
    decision = KvHeadroom().decide_route(query(A, B, cached=[64, 0]))
    assert decision.replica == "a"
    assert decision.scores.tolist() == [15 / 7, 20 / 13]


def test_a_prefix_that_is_still_being_computed_is_needed():
    decision = KvHeadroom().decide_route(query(A, B, cached=[64, 0], computed=[0, 0]))
    assert decision.replica == "b"
    assert decision.scores.tolist() == [15 / 11, 20 / 13]


def test_a_prefix_outweighs_others_memory_but_not_their_queue():
    """A prompt of 1,600 tokens with all but 64 cached at a, where 40 of 100 pages are held: 60 for
    4 + 2 of output beside 100 for 102. A queue of 70 pages at a is more than the prompt saves."""
    held = {"pages_free": 60}
    asked = {"cached": [1536, 0], "prompt": 1600, "output": 32.0}
    decision = KvHeadroom().decide_route(query(held, {}, **asked))
    assert decision.scores.tolist() == [60 / 6, 100 / 102]
    assert decision.replica == "a"
    queue = held | {"pages_promised": 70}
    assert KvHeadroom().decide_route(query(queue, {}, **asked)).replica == "b"


def test_without_any_supply_the_least_demand_takes_it():
    full = {"pages_free": 0, "pages_evictable": 0}
    decision = KvHeadroom().decide_route(query(A | full, B | full, A | full | {"requests": 1}))
    assert decision.scores.tolist() == [0.0, 0.0, 0.0]
    assert decision.replica == "a"
    assert KvHeadroom().decide_route(query(B | full, A | full)).replica == "b"


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
    """130 tokens are 33 pages of 4 or 9 of 16; 20 of them are cached at both."""
    small = {"pages_free": 30, "page_size": 4}
    large = {"pages_free": 16, "page_size": 16}
    decision = KvHeadroom().decide_route(query(small, large, output=30.0, cached=[20, 20]))
    assert decision.scores.tolist() == [30 * 4 / (33 * 4 - 20), 16 * 16 / (9 * 16 - 20)]


def test_bad_temperature_is_refused():
    with pytest.raises(ConfigError, match="hot_c must be > 0, got 0"):
        KvHeadroom(hot_c=0)
