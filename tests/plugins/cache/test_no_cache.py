"""No cache: matches nothing, stores nothing, and still counts its handles. Beside it: admit_all."""

import numpy as np
import pytest

from core.errors import InvariantError
from core.queries import CacheAdmissionQuery, PrefixCacheQuery
from core.request import Request
from plugins.cache.admit_all import AdmitAll
from plugins.cache.none import EmptyCache, NoCache

KEYS = np.arange(3, dtype=np.uint64)
TOKENS = np.arange(12, dtype=np.int32)
PAGES = np.array([7, 8, 9], np.int32)


@pytest.fixture
def cache() -> EmptyCache:
    return NoCache().build_prefix_cache(PrefixCacheQuery(page_size=4, evictor=None))


def test_insert_leaves_every_page_with_the_caller(cache):
    handle, num_existing, num_stored = cache.insert(KEYS, TOKENS, PAGES, "")
    assert (num_existing, num_stored, cache.num_pages, cache.num_evictable) == (0, 0, 0, 0)
    assert not cache.stores
    cache.unlock(handle)
    assert len(cache.match(KEYS, TOKENS, "").pages) == 0
    assert len(cache.evict(3)) == len(cache.clear()) == 0
    cache.check()


def test_handles_are_given_back_once(cache):
    handle = cache.lock(cache.match(KEYS, TOKENS, ""))
    other = cache.fork(handle)
    assert cache.num_handles == 2
    cache.unlock(handle)
    cache.unlock(other)
    assert cache.num_handles == 0
    for call in (cache.unlock, cache.fork):
        with pytest.raises(InvariantError, match="locked"):
            call(handle)


def test_admit_all_admits():
    request = Request("a", np.array([1, 2], np.int32))
    query = CacheAdmissionQuery(request, num_tokens=2, cached_tokens=0, now_s=0.0)
    assert AdmitAll().decide_cache_admission(query).admit
