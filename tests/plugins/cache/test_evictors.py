"""Every shipped evictor keeps the tree's contract: under random use, and in an engine."""

import numpy as np
import pytest

from core.queries import EvictorQuery
from plugins.cache.fifo import Fifo
from plugins.cache.gdsf import Gdsf
from plugins.cache.lfu import Lfu
from plugins.cache.lru import Lru
from plugins.cache.s3_fifo import S3Fifo
from plugins.cache.second_hit import SecondHit
from plugins.cache.slru import Slru
from plugins.cache.workload_aware import WorkloadAware
from tests.engine_harness import Arrival, make_engine, run

EVICTORS = {
    plugin.__name__: plugin for plugin in (Fifo, Gdsf, Lfu, Lru, S3Fifo, Slru, WorkloadAware)
}


class Contract:
    """Passes calls on and insists that only what is on offer is withdrawn or returned."""

    def __init__(self, evictor):
        self.evictor = evictor
        self.offered = set()
        self.on_insert, self.on_hit = evictor.on_insert, evictor.on_hit

    def on_unlock(self, node):
        assert node not in self.offered
        self.offered.add(node)
        self.evictor.on_unlock(node)

    def on_lock(self, node):
        self.offered.remove(node)
        self.evictor.on_lock(node)

    def pop(self):
        node = self.evictor.pop()
        self.offered.remove(node)
        return node


@pytest.mark.parametrize("name", EVICTORS)
def test_offers_exactly_the_unlocked_leaves_under_random_use(harness, name):
    evictor = EVICTORS[name]().build_evictor(EvictorQuery(1))
    cache = harness(1, Contract(evictor))
    random = np.random.default_rng(5)
    handles = []
    for _ in range(500):
        path = random.integers(0, 3, random.integers(0, 8))
        move = random.integers(5)
        if move == 0:
            handles.append(cache.lock(path))
        elif move == 1:
            handles.append(cache.insert(path)[0])
        elif move == 2:
            cache.tree.drop(cache.match(path))
        elif move == 3 and handles:
            cache.tree.unlock(handles.pop(random.integers(len(handles))))
        else:
            cache.tree.evict(random.integers(6))
        on_offer = {node for node in cache.nodes() if node.evictable}
        assert cache.evictor.offered == on_offer
        assert len(evictor) == len(on_offer)
        cache.tree.check()
    for handle in handles:
        cache.tree.unlock(handle)
    cache.tree.clear()
    assert (cache.tree.num_pages, len(evictor)) == (0, 0)
    with pytest.raises(LookupError):
        evictor.pop()


@pytest.mark.parametrize("name", EVICTORS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_serves_every_request_in_an_engine_too_small_for_their_prefixes(name, page_size):
    """Strict mode recounts the tree after each step."""
    arrivals = [
        Arrival(8 * number, f"r{number}", 40 + number, 12, shares=(f"r{number % 3}", 32))
        for number in range(24)
    ]
    engine = make_engine(pages=192 // page_size, page_size=page_size, evictor=EVICTORS[name]())
    done = run(engine, arrivals)
    assert all(len(record.choices[0].token_ids) == 12 for record in done.records.values())
    assert done.total("pages_evicted") > 0
    assert sum(record.cached_tokens for record in done.records.values()) > 0


def test_second_hit_admission_and_an_evictor_work_together():
    arrivals = [
        Arrival(4 * number, f"r{number}", 48, 4, shares=(f"r{number % 3}", 48))
        for number in range(12)
    ]
    engine = make_engine(cache_admission=SecondHit(16), evictor=S3Fifo())
    done = run(engine, arrivals)
    found = [done.records[f"r{number}"].cached_tokens for number in range(12)]
    assert found == [0] * 6 + [32] * 6


@pytest.mark.parametrize("name", EVICTORS)
def test_finds_and_evicts_the_same_with_and_without_overlapping_launches(name):
    arrivals = [
        Arrival(5 * number, f"r{number}", 40 + number, 10, shares=(f"r{number % 4}", 32))
        for number in range(20)
    ]
    outcomes = []
    for overlap in (False, True):
        done = run(make_engine(pages=14, overlap=overlap, evictor=EVICTORS[name]()), arrivals)
        found = [done.records[f"r{number}"].cached_tokens for number in range(20)]
        outcomes.append((found, done.total("pages_evicted")))
    assert outcomes[0] == outcomes[1]
    assert sum(outcomes[0][0]) > 0
    assert outcomes[0][1] > 0
