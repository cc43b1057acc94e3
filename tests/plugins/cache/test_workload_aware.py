"""Workload-aware eviction: the fit by hand, and who goes on the real tree at page size 1."""

from math import log1p

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import EvictorQuery
from plugins.cache.lru import Lru
from plugins.cache.workload_aware import FEWEST_NAMES, ReuseFit, WorkloadAware

QUERY = EvictorQuery(1)


def test_fit_leans_on_the_mean_of_all_by_its_weight():
    fit, prior = ReuseFit(reused=3.0, time=30.0, unused=1.0), ReuseFit(1.0, 5.0, 1.0)
    assert fit.leaning_on(prior, 2.0) == (4 / 6, 40 / 5)
    probability, mean = fit.leaning_on(prior, 1e-12)
    assert (probability, mean) == (pytest.approx(0.75), pytest.approx(10))


def test_older_observations_lose_weight():
    fit = ReuseFit(1.0, 4.0, 1.0)
    fit.observe(10, decay=0.5)
    assert (fit.reused, fit.time, fit.unused) == (1.5, 12.0, 0.5)
    fit.observe(None, decay=0.5)
    assert (fit.reused, fit.time, fit.unused) == (0.75, 6.0, 1.25)


def test_reuse_is_counted_for_the_category_that_the_node_had(harness):
    cache = harness(1, WorkloadAware(decay=1.0).build_evictor(QUERY))
    cache.store([1])  # access 1
    cache.store([2])  # access 2
    cache.hit([1])  # access 3: after 2, from no hit to one
    cache.hit([1])  # access 4: after 1, from one to two
    first, second = cache.evictor._fits[0], cache.evictor._fits[1]
    assert (first.reused, first.time, first.unused) == (2.0, 3.0, 1.0)
    assert (second.reused, second.time, second.unused) == (2.0, 2.0, 1.0)
    assert cache.evictor._all.reused == 3.0


def test_reuse_of_what_was_evicted_is_seen_and_the_forgotten_counts_as_unused(harness):
    cache = harness(1, WorkloadAware(decay=1.0, history=0.1).build_evictor(QUERY))
    for token in (1, 2, 3):
        cache.store([token])  # accesses 1 to 3
    assert cache.tree.evict(1).tolist() == [1]
    cache.store([1])  # access 4, its second turn
    fit = cache.evictor._fits[0]
    assert (fit.reused, fit.time, fit.unused) == (2.0, 4.0, 1.0)
    assert cache.evictor._turn(cache.nodes()[-1]) == 1
    for token in range(100, 100 + FEWEST_NAMES):
        cache.store([token])
    cache.tree.evict(FEWEST_NAMES)  # 2, 3 and younger ones of the first turn: all are remembered
    assert (fit.reused, fit.unused) == (2.0, 1.0)
    cache.tree.evict(2)  # two more names: the first two are forgotten
    assert (fit.reused, fit.unused) == (2.0, 3.0)


def test_worth_is_the_logarithm_of_the_fitted_probability(harness):
    cache = harness(1, WorkloadAware(prior_weight=1e-9, life_share=1.0).build_evictor(QUERY))
    cache.store([1])
    cache.store([2])
    (node, _) = cache.nodes()
    evictor = cache.evictor
    evictor._fits[0] = ReuseFit(reused=1.0, time=8.0, unused=3.0)
    assert evictor._worth(0, node) == pytest.approx(np.log(0.25) - 1 / 8)  # no eviction yet
    evictor._life = 4.0
    expected = np.log(0.25) - 1 / 8 + log1p(-np.exp(-4 / 8))
    assert evictor._worth(0, node) == pytest.approx(expected)


def test_within_a_category_the_oldest_goes_first(harness):
    cache = harness(1, WorkloadAware().build_evictor(QUERY))
    for token in (1, 2, 3):
        cache.store([token])
    cache.store([2])  # used again, though not hit
    assert [cache.tree.evict(1).item() for _ in range(3)] == [1, 3, 2]


def hits_of(cache, capacity):
    """Returning prompts 0 .. 7 in turn, each behind two prompts that never come back."""
    hits = 0
    for number in range(1200):
        token = number // 3 % 8 if number % 3 == 0 else 100 + number
        hits += cache.hit([token])
        if cache.tree.num_pages >= capacity:
            cache.tree.evict(1)
        cache.store([token])
    return hits


def test_a_category_that_comes_back_is_kept_from_one_that_does_not(harness):
    """A returning prompt comes every 24 requests: LRU with room for 16 finds none ever."""
    assert hits_of(harness(1, Lru().build_evictor(QUERY)), 16) == 0
    # Four hundred asks, of which the first of each can find nothing.
    assert hits_of(harness(1, WorkloadAware().build_evictor(QUERY)), 16) > 250


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_turn": -1}, "max_turn must be >= 0, got -1"),
        ({"history": 0}, "history must be > 0, got 0"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ({"prior_weight": 0.0}, "prior_weight must be > 0, got 0.0"),
        ({"life_share": 1.5}, r"life_share must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_values_are_named(arguments, text):
    with pytest.raises(ConfigError, match=text):
        WorkloadAware(**arguments)
