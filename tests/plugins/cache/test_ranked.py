"""FIFO, LFU and SLRU over the real tree: who goes, worked out from the nodes' facts."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import EvictorQuery
from plugins.cache.fifo import Fifo
from plugins.cache.lfu import Lfu
from plugins.cache.slru import Slru

QUERY = EvictorQuery(page_size=1)
RULES = {
    "fifo": (Fifo(), lambda node: node.created),
    "lfu": (Lfu(), lambda node: (node.hits, node.last_used)),
    "slru": (Slru(), lambda node: (node.hits >= 2, node.last_used)),
    "slru_1": (Slru(protected_hits=1), lambda node: (node.hits >= 1, node.last_used)),
}


def filled(harness, plugin):
    """Prompts 1, 2, 3 in this order; 1 was hit once, 2 twice, then 1 once more."""
    cache = harness(1, plugin.build_evictor(QUERY))
    for token in (1, 2, 3):
        cache.store([token])
    for token in (1, 2, 2, 1):
        assert cache.hit([token]) == 1
    cache.store([4])
    return cache


@pytest.mark.parametrize(
    ("plugin", "order"),
    [
        (Fifo(), [1, 2, 3, 4]),
        (Lfu(), [3, 4, 2, 1]),
        (Slru(2), [3, 4, 2, 1]),
        (Slru(3), [3, 2, 1, 4]),
    ],
)
def test_leaves_go_in_the_order_of_the_rule(harness, plugin, order):
    cache = filled(harness, plugin)
    # Page ids are handed out in order: prompt n holds page n.
    assert [cache.tree.evict(1).item() for _ in range(4)] == order


def test_a_parent_goes_by_its_own_facts_when_its_children_are_gone(harness):
    cache = harness(1, Fifo().build_evictor(QUERY))
    cache.store([1, 2])
    cache.store([5])
    cache.store([1, 3])
    # Children of 1 are in the way of the oldest; 2 was created with it.
    assert [cache.tree.evict(1).item() for _ in range(4)] == [2, 3, 5, 1]


@pytest.mark.parametrize("name", RULES)
def test_victim_is_the_least_of_the_evictable_leaves_under_random_use(harness, name):
    plugin, rank = RULES[name]
    cache = harness(1, plugin.build_evictor(QUERY))
    random = np.random.default_rng(3)
    handles, evicted = [], 0
    for _ in range(500):
        path = random.integers(0, 3, random.integers(1, 7))
        move = random.integers(5)
        if move == 0:
            cache.hit(path)
        elif move == 1:
            handles.append(cache.insert(path)[0])
        elif move == 2 and handles:
            cache.tree.unlock(handles.pop(random.integers(len(handles))))
        elif move == 3:
            cache.store(path)
        elif cache.tree.num_evictable:
            offered = [node for node in cache.nodes() if node.evictable]
            least = min(map(rank, offered))
            last_pages = [node.pages[-1] for node in offered if rank(node) == least]
            assert cache.tree.evict(1).item() in last_pages
            evicted += 1
        assert len(cache.evictor) == sum(node.evictable for node in cache.nodes())
    assert evicted > 30


def test_bad_threshold_is_named():
    with pytest.raises(ConfigError, match="protected_hits must be >= 1, got 0"):
        Slru(0)
