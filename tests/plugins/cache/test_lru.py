"""The LRU evictor over stand-in nodes."""

from dataclasses import dataclass

import numpy as np
import pytest

from core.queries import EvictorQuery
from plugins.cache.lru import Lru, LruEvictor


@dataclass(eq=False)
class StubNode:
    last_used: int
    num_pages: int = 1
    depth_pages: int = 1
    created: int = 0
    hits: int = 0


@pytest.fixture
def lru() -> LruEvictor:
    return Lru().build_evictor(EvictorQuery(page_size=16))


def test_pop_returns_the_oldest_use_first(lru):
    nodes = [StubNode(last_used) for last_used in (5, 2, 9)]
    for node in nodes:
        lru.on_insert(node)
        lru.on_unlock(node)
    assert [lru.pop().last_used for _ in nodes] == [2, 5, 9]


def test_pop_without_an_evictable_node_raises(lru):
    node = StubNode(1)
    lru.on_insert(node)
    with pytest.raises(LookupError):
        lru.pop()
    lru.on_unlock(node)
    lru.on_lock(node)
    with pytest.raises(LookupError):
        lru.pop()


def test_use_while_locked_moves_a_node_back(lru):
    hot, cold = StubNode(1), StubNode(2)
    for node in (hot, cold):
        lru.on_unlock(node)
    lru.on_lock(hot)
    hot.last_used = 3
    lru.on_hit(hot)
    lru.on_unlock(hot)
    assert lru.pop() is cold
    assert lru.pop() is hot


def test_trimmed_node_handed_back_is_offered_again(lru):
    node, other = StubNode(1), StubNode(2)
    lru.on_unlock(node)
    lru.on_unlock(other)
    assert lru.pop() is node
    lru.on_unlock(node)
    assert lru.pop() is node
    assert lru.pop() is other


def test_locking_one_node_forever_does_not_grow_the_heap(lru):
    node = StubNode(0)
    lru.on_unlock(node)
    for access in range(1000):
        lru.on_lock(node)
        node.last_used = access
        lru.on_unlock(node)
    assert len(lru) == len(lru._heap) == 1


def test_order_equals_sorting_under_random_use(lru):
    random = np.random.default_rng(0)
    nodes = [StubNode(i) for i in range(50)]
    offered: set[StubNode] = set()
    for access in range(100, 3000):
        node = nodes[random.integers(50)]
        if node in offered:
            lru.on_lock(node)
            offered.remove(node)
            node.last_used = access
        else:
            lru.on_unlock(node)
            offered.add(node)
        if access % 7 == 0 and offered:
            expected = min(offered, key=lambda n: n.last_used)
            assert lru.pop() is expected
            offered.remove(expected)
    assert len(lru) == len(offered)
