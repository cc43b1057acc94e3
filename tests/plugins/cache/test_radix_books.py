"""What the radix tree promises its evictor, what it refuses from one, and what `check` finds."""

import numpy as np
import pytest

from core.errors import InvariantError, PolicyError
from plugins.cache.lru import LruEvictor

P = 4


def tokens(*pages):
    """Pages of four equal tokens each."""
    return np.repeat(np.array(pages, np.int32), P)


@pytest.fixture
def cache(harness):
    return harness(P)


class Recorder(LruEvictor):
    """LRU that insists on the evictor's contract: on offer once, and unchanged while on offer."""

    def __init__(self):
        super().__init__()
        self.offered = {}

    def on_insert(self, node):
        assert node not in self.offered
        assert 1 <= node.created <= node.last_used

    def on_unlock(self, node):
        assert node not in self.offered
        assert node.locks == 0
        assert not node.children
        self.offered[node] = (node.num_pages, node.depth_pages, node.last_used, node.hits)
        super().on_unlock(node)

    def on_lock(self, node):
        facts = (node.num_pages, node.depth_pages, node.last_used, node.hits)
        assert self.offered.pop(node) == facts
        super().on_lock(node)

    def pop(self):
        node = super().pop()
        facts = (node.num_pages, node.depth_pages, node.last_used, node.hits)
        assert self.offered.pop(node) == facts
        return node


def test_node_on_offer_to_the_evictor_never_changes(harness):
    cache = harness(1, Recorder())
    random = np.random.default_rng(0)
    handles = []
    for _ in range(1500):
        path = random.integers(0, 3, random.integers(0, 8))
        move = random.integers(4)
        if move == 0:
            handles.append(cache.lock(path))
        elif move == 1:
            handles.append(cache.insert(path)[0])
        elif move == 2 and handles:
            cache.tree.unlock(handles.pop(random.integers(len(handles))))
        else:
            cache.tree.evict(random.integers(6))
        on_offer = {node for node in cache.nodes() if node.evictable}
        assert set(cache.evictor.offered) == on_offer


class RunsDry:
    """An evictor that offers nothing, or always the same thing."""

    def __init__(self, offer=None):
        self.offer = offer

    def on_insert(self, node):
        pass

    on_hit = on_lock = on_unlock = on_insert

    def pop(self):
        if self.offer is None:
            raise LookupError
        return self.offer


def test_evictor_that_runs_dry_is_named(harness):
    cache = harness(P, RunsDry())
    cache.store(tokens(1))
    with pytest.raises(PolicyError, match=r"RunsDry.pop must offer one of 1 evictable pages"):
        cache.tree.evict(1)


def test_evictor_that_offers_a_locked_node_is_named(harness):
    cache = harness(P, RunsDry())
    cache.insert(tokens(1))
    cache.store(tokens(2))
    cache.evictor.offer = cache.nodes()[0]
    with pytest.raises(PolicyError, match=r"RunsDry.pop must return an evictable leaf"):
        cache.tree.evict(1)
    cache.evictor.offer = None
    assert cache.tree.num_pages == 2


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda tree, node: setattr(tree, "num_evictable", 1), "num_evictable must be 2, got 1"),
        (lambda tree, node: setattr(tree, "num_pages", 3), "num_pages must be 2, got 3"),
        (
            lambda tree, node: setattr(node, "locks", 1),
            "locks must be the 0 of live handles, got 1",
        ),
        (lambda tree, node: setattr(node, "evictable", False), "evictable must be True"),
        (lambda tree, node: setattr(node, "depth_pages", 1), "depth_pages must be 2, got 1"),
        (lambda tree, node: setattr(node, "pages", node.pages[[0, 0]]), "stored once"),
        (lambda tree, node: setattr(node, "parent", node), "must name its parent"),
        (lambda tree, node: setattr(node, "first_key", 7), "stand at its first key"),
        (lambda tree, node: setattr(node, "pages", node.pages[:1]), "of 2 pages must hold as many"),
    ],
)
def test_check_finds_damage(cache, damage, text):
    cache.store(tokens(1, 2))
    damage(cache.tree, cache.nodes()[0])
    with pytest.raises(InvariantError, match=text):
        cache.tree.check()
