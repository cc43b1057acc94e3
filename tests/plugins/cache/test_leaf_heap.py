"""The heap that evictors share."""

from dataclasses import dataclass

import numpy as np
import pytest

from plugins.cache.leaf_heap import SLACK, LeafHeap


@dataclass(eq=False)
class StubNode:
    name: str
    num_pages: int = 1
    depth_pages: int = 1
    last_used: int = 1
    created: int = 1
    hits: int = 0


def test_smallest_rank_goes_first_and_equal_ranks_in_order_of_offer():
    heap = LeafHeap()
    for name, rank in (("a", 2), ("b", 1), ("c", 2), ("d", 0)):
        heap.offer(StubNode(name), rank)
    assert (heap.first()[0], heap.first()[1].name, len(heap)) == (0, "d", 4)
    assert [heap.pop()[1].name for _ in range(4)] == ["d", "b", "a", "c"]
    for call in (heap.first, heap.pop):
        with pytest.raises(LookupError, match="no evictable node"):
            call()


def test_withdrawn_node_is_passed_over_and_its_new_rank_counts():
    heap = LeafHeap()
    low, high = StubNode("low"), StubNode("high")
    heap.offer(low, 1)
    heap.offer(high, 2)
    heap.withdraw(low)
    assert heap.first() == (2, high)
    heap.offer(low, 3)
    assert [heap.pop()[1] for _ in range(2)] == [high, low]
    with pytest.raises(KeyError):
        heap.withdraw(low)


def test_withdrawing_forever_does_not_grow_the_heap():
    heap, node = LeafHeap(), StubNode("a")
    for rank in range(5000):
        heap.offer(node, rank)
        heap.withdraw(node)
    assert len(heap._heap) <= SLACK + 2


def test_order_equals_sorting_under_random_use():
    random = np.random.default_rng(0)
    heap, offered = LeafHeap(), {}
    nodes = [StubNode(str(i)) for i in range(60)]
    for _ in range(4000):
        node = nodes[random.integers(60)]
        if node in offered:
            heap.withdraw(node)
            del offered[node]
        else:
            offered[node] = int(random.integers(10**9))
            heap.offer(node, offered[node])
        if random.random() < 0.1 and offered:
            expected = min(offered, key=offered.get)
            assert heap.pop() == (offered.pop(expected), expected)
        assert len(heap) == len(offered)
