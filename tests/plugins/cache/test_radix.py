"""The radix tree's rules, one at a time; page size 4 unless a case says otherwise."""

import numpy as np
import pytest

from core.errors import InvariantError

P = 4


def tokens(*pages):
    """Pages of four equal tokens each, by their letter."""
    return [ord(letter) for page in pages for letter in page * P]


@pytest.fixture
def cache(harness):
    return harness(P)


def test_match_is_whole_pages_in_order(cache):
    stored = cache.store(tokens("a", "b", "c"))
    assert cache.match([*tokens("a", "b"), 99, 99]).pages.tolist() == stored[:2].tolist()
    assert cache.match(tokens("a", "b", "c", "d")).pages.tolist() == stored.tolist()
    assert cache.match(tokens("a")[:3]).pages.tolist() == []
    assert cache.match(tokens("b", "c")).pages.tolist() == []
    assert cache.match(tokens("a")).pages.dtype == np.int32


def test_match_changes_nothing(cache):
    cache.store(tokens("a", "b", "c"))
    before = [(n, n.last_used, n.hits, n.num_pages) for n in cache.nodes()]
    cache.match(tokens("a", "x"))
    cache.match(tokens("a", "b", "c"))
    assert [(n, n.last_used, n.hits, n.num_pages) for n in cache.nodes()] == before
    assert len(cache.evictor) == 1


def test_insert_tells_what_was_there_and_takes_the_rest(cache):
    first = cache.store(tokens("a", "b"))
    handle, num_existing, num_stored, second = cache.insert(tokens("a", "b", "c"))
    assert (num_existing, num_stored, handle.num_pages) == (2, 3, 3)
    pages = cache.match(tokens("a", "b", "c")).pages
    assert pages.tolist() == [*first, second[2]]
    assert (cache.tree.num_pages, cache.tree.num_evictable) == (3, 0)


def test_insert_of_a_stored_path_takes_nothing(cache):
    first = cache.store(tokens("a", "b", "c"))
    handle, num_existing, num_stored, _ = cache.insert(tokens("a", "b"))
    assert (num_existing, num_stored, handle.num_pages) == (2, 2, 2)
    assert cache.match(tokens("a", "b", "c")).pages.tolist() == first.tolist()
    assert (cache.tree.num_pages, cache.tree.num_evictable) == (3, 1)


def test_insert_of_no_page_gives_a_handle_on_nothing(cache):
    handle, num_existing, num_stored, _ = cache.insert(tokens("a")[:3])
    assert (num_existing, num_stored, handle.num_pages) == (0, 0, 0)
    cache.tree.unlock(cache.tree.fork(handle))
    cache.tree.unlock(handle)
    assert cache.tree.num_pages == cache.tree.num_handles == 0


def test_stored_path_does_not_alias_the_callers_arrays(cache):
    keys, whole = cache.keys(tokens("a", "b"))
    pages = np.array([5, 6], np.int32)
    cache.tree.unlock(cache.tree.insert(keys, whole, pages, "")[0])
    keys[:], whole[:], pages[:] = 0, 0, 0
    assert cache.match(tokens("a", "b")).pages.tolist() == [5, 6]


def test_lock_of_a_part_of_a_node_locks_exactly_that_part(cache):
    stored = cache.store(tokens("a", "b", "c", "d"))
    match = cache.match(tokens("a", "b", "x"))
    assert match.num_unlocked_pages == 2
    handle = cache.tree.lock(match)
    assert cache.tree.num_evictable == 2
    assert cache.match(tokens("a", "b", "c")).num_unlocked_pages == 1
    assert cache.tree.evict(4).tolist() == stored[2:].tolist()
    cache.tree.unlock(handle)
    assert cache.tree.num_evictable == 2
    cache.tree.check()


def test_handle_keeps_its_path_when_a_lock_above_splits_its_node(cache):
    handle, *_, stored = cache.insert(tokens("a", "b", "c"))
    upper = cache.lock(tokens("a"))
    cache.tree.check()
    assert [node.locks for node in cache.nodes()] == [2, 1]
    cache.tree.unlock(upper)
    cache.tree.check()
    assert len(cache.tree.evict(9)) == 0
    cache.tree.unlock(handle)
    cache.tree.check()
    assert sorted(cache.tree.evict(9)) == stored.tolist()


def test_fork_is_a_lock_of_its_own_but_no_hit(cache):
    handle, *_ = cache.insert(tokens("a", "b"))
    twin = cache.tree.fork(handle)
    (node,) = cache.nodes()
    assert (node.locks, node.hits, twin.num_pages) == (2, 0, 2)
    cache.tree.unlock(handle)
    assert len(cache.tree.evict(9)) == 0
    cache.tree.unlock(twin)
    assert len(cache.tree.evict(9)) == 2


def test_handle_given_back_twice_raises_and_changes_nothing(cache):
    handle, *_ = cache.insert(tokens("a"))
    cache.tree.unlock(handle)
    for call in (cache.tree.unlock, cache.tree.fork):
        with pytest.raises(InvariantError, match="locked"):
            call(handle)
    cache.tree.check()


@pytest.mark.parametrize("change", ["evict", "insert", "unlock"])
def test_match_older_than_a_change_cannot_be_locked(cache, change):
    cache.store(tokens("a", "b"))
    handle, *_ = cache.insert(tokens("x"))
    match = cache.match(tokens("a", "b"))
    calls = {
        "evict": lambda: cache.tree.evict(1),
        "insert": lambda: cache.insert(tokens("y")),
        "unlock": lambda: cache.tree.unlock(handle),
    }
    calls[change]()
    with pytest.raises(InvariantError, match="match again"):
        cache.tree.lock(match)


def test_evict_takes_the_tail_of_the_last_victim_only(cache):
    old = cache.store(tokens("a", "b", "c"))
    new = cache.store(tokens("x", "y", "z"))
    assert sorted(cache.tree.evict(4)) == [*old, new[2]]
    assert cache.match(tokens("x", "y", "z")).pages.tolist() == new[:2].tolist()
    cache.tree.check()
    assert sorted(cache.tree.evict(1)) == [new[1]]
    assert (cache.tree.num_pages, cache.tree.num_evictable) == (1, 1)


def test_parent_becomes_evictable_when_its_last_child_goes(cache):
    trunk = cache.store(tokens("a", "b"))
    leaves = [cache.store(tokens("a", "b", leaf))[2] for leaf in "xyz"]
    assert cache.tree.evict(2).tolist() == leaves[:2]
    assert len(cache.evictor) == 1
    assert cache.tree.evict(2).tolist() == [leaves[2], trunk[1]]
    assert cache.tree.evict(9).tolist() == [trunk[0]]
    assert cache.tree._roots == {}


def test_trimmed_leaf_lets_go_of_its_content(cache):
    cache.store(tokens(*"abcdefghijklmnop"))
    (node,) = cache.nodes()
    for left in range(15, 0, -1):
        cache.tree.evict(1)
        assert len(node.content) <= 2 * left
        assert len(cache.match(tokens(*"abcdefghijklmnop")).pages) == left
    assert len(node.content) <= 2


def test_evict_of_nothing_or_less_drops_nothing(cache):
    cache.store(tokens("a"))
    assert len(cache.tree.evict(0)) == len(cache.tree.evict(-3)) == 0
    assert cache.tree.num_pages == 1


def test_clear_keeps_what_is_locked(cache):
    handle, *_ = cache.insert(tokens("a", "b"))
    other = cache.store(tokens("a", "x", "y"))
    assert sorted(cache.tree.clear()) == other[1:].tolist()
    assert (cache.tree.num_pages, cache.tree.num_evictable) == (2, 0)
    cache.tree.unlock(handle)
    assert len(cache.tree.clear()) == 2


def test_keys_without_tokens_match_only_each_other(cache):
    keys, whole = cache.keys(tokens("a", "b"))
    handle, *_ = cache.tree.insert(keys, None, np.array([1, 2], np.int32), "")
    assert cache.tree.match(keys, None, "").pages.tolist() == [1, 2]
    assert len(cache.tree.match(keys, whole, "").pages) == 0
    longer, _ = cache.keys(tokens("a", "c"))
    _, num_existing, num_stored = cache.tree.insert(longer, None, np.array([3, 4], np.int32), "")
    assert (num_existing, num_stored) == (1, 2)
    cache.tree.unlock(handle)
    cache.tree.check()
    assert cache.tree.evict(9).tolist() == [2]


def test_growing_sequence_stays_one_node(cache):
    handle, *_ = cache.insert(tokens("a"))
    for length in range(2, 20):
        longer, *_ = cache.insert(tokens(*"abcdefghijklmnopqrst"[:length]))
        cache.tree.unlock(handle)
        handle = longer
        cache.tree.check()
    (node,) = cache.nodes()
    assert (node.num_pages, node.locks, handle.num_pages) == (19, 1, 19)
    assert (node.created, node.last_used) == (1, 19)
    assert cache.match(tokens(*"abcdefghijklmnopqrst")).pages.tolist()[:2] == [1, 3]


def test_growth_keeps_the_boundary_where_a_hit_or_a_handle_ends(cache):
    cache.store(tokens("a", "b"))
    hit = cache.lock(tokens("a", "b"))
    handle, *_ = cache.insert(tokens("a", "b", "c"))
    cache.tree.unlock(hit)
    assert [(node.num_pages, node.hits) for node in cache.nodes()] == [(2, 1), (1, 0)]
    twin = cache.tree.fork(handle)
    longer, *_ = cache.insert(tokens("a", "b", "c", "d"))
    cache.tree.unlock(handle)
    assert [node.locks for node in cache.nodes()] == [2, 2, 1]
    cache.tree.unlock(twin)
    assert [(node.num_pages, node.locks) for node in cache.nodes()] == [(2, 1), (2, 1)]
    cache.tree.unlock(longer)
    cache.tree.check()


def test_recency_and_hits_change_with_lock_and_insert_only(cache):
    cache.store(tokens("a", "b"))
    (node,) = cache.nodes()
    assert (node.created, node.last_used, node.hits) == (1, 1, 0)
    cache.tree.unlock(cache.lock(tokens("a", "b")))
    assert (node.created, node.last_used, node.hits) == (1, 2, 1)
    cache.store(tokens("a", "b"))
    assert (node.last_used, node.hits) == (3, 1)


def test_wrong_shapes_are_refused(cache):
    keys, whole = cache.keys(tokens("a", "b"))
    with pytest.raises(ValueError, match=r"keys must be uint64, got int64"):
        cache.tree.match(keys.astype(np.int64), whole, "")
    with pytest.raises(ValueError, match=r"tokens must be int32 \[2 keys \* 4\], got int32 \[7\]"):
        cache.tree.match(keys, whole[:-1], "")
    with pytest.raises(ValueError, match=r"pages must have one entry a key \(2\), got 1"):
        cache.tree.insert(keys, whole, np.array([1], np.int32), "")
