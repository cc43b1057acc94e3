"""GDSF, worked out by hand."""

from dataclasses import dataclass
from typing import Any

import pytest

from core.errors import ConfigError
from core.queries import EvictorQuery
from plugins.cache.gdsf import Gdsf


@dataclass(eq=False)
class StubNode:
    num_pages: int = 1
    depth_pages: int = 1
    hits: int = 0
    last_used: int = 1
    created: int = 1
    memo: Any = None
    head_digest: int = 0


def offered(evictor, *nodes):
    for node in nodes:
        evictor.on_insert(node)
        evictor.on_unlock(node)
    return nodes


def evictor_of(context_cost, page_size=1):
    return Gdsf(context_cost).build_evictor(EvictorQuery(page_size))


def test_of_equally_popular_leaves_the_cheapest_to_compute_goes_first():
    evictor = evictor_of(context_cost=1.0)
    # H = 1 + mean context: 1.5, 3.5, and (depth 4, two pages) 4.
    shallow, deep, long = offered(evictor, StubNode(), StubNode(1, 3), StubNode(2, 4))
    assert [evictor.pop() for _ in range(3)] == [shallow, deep, long]


def test_popularity_counts_for_more_than_cost():
    evictor = evictor_of(context_cost=1.0)
    hot, deep = StubNode(hits=2), StubNode(1, 3)  # 3 * 1.5 against 3.5
    offered(evictor, hot, deep)
    assert evictor.pop() is deep


def test_worth_that_is_not_renewed_falls_behind_the_inflation():
    evictor = evictor_of(context_cost=0.0)
    (old,) = offered(evictor, StubNode(hits=2))  # H = 3
    fresh = [offered(evictor, StubNode())[0] for _ in range(1)]
    assert evictor.pop() is fresh[0]  # H = 1, L = 1
    (second,) = offered(evictor, StubNode())  # H = 2
    assert evictor.pop() is second
    (third,) = offered(evictor, StubNode())  # H = 3 as well: the older offer goes first
    assert [evictor.pop(), evictor.pop()] == [old, third]


def test_hit_renews_the_worth_and_an_eviction_below_does_not():
    evictor = evictor_of(context_cost=0.0)
    parent, hot = StubNode(), StubNode()
    evictor.on_insert(parent)  # L = 0; it has children, so it is not on offer yet
    for _ in range(2):
        offered(evictor, StubNode())
        evictor.pop()
    evictor.on_insert(hot)
    hot.hits = 1
    evictor.on_hit(hot)
    evictor.on_unlock(hot)  # H = 2 + 2
    evictor.on_unlock(parent)  # H = 0 + 1: nobody used it meanwhile
    assert [evictor.pop(), evictor.pop()] == [parent, hot]


def test_cost_of_context_is_that_of_the_page_size():
    small, large = evictor_of(0.5, page_size=1), evictor_of(0.5, page_size=16)
    assert small._cost(StubNode(2, 4)) == 1 + 0.5 * 3
    assert large._cost(StubNode(2, 4)) == 1 + 0.5 * 48


def test_bad_cost_is_named():
    with pytest.raises(ConfigError, match="context_cost must be >= 0, got -1"):
        Gdsf(-1)


def test_split_halves_are_used_by_who_split_them(harness):
    cache = harness(1, evictor_of(context_cost=0.0))
    cache.store([9])
    cache.tree.evict(1)  # L = 1
    cache.store([1, 2, 3])
    cache.hit([1])
    upper, lower = cache.nodes()
    assert (upper.memo, lower.memo, upper.hits, lower.hits) == (1.0, 1.0, 1, 0)
    assert cache.tree.evict(3).tolist() == [3, 4, 2]  # prompt 9 had page 1
