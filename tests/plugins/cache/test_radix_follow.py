"""Insertions that follow the path of a handle: leaves that grow, and what may be put off."""

import numpy as np
import pytest

from core.errors import InvariantError
from plugins.cache.gdsf import GdsfEvictor

PAGE = 4


def text(*letters):
    """A page of equal tokens for each letter."""
    return np.repeat([ord(letter) for letter in letters], PAGE).astype(np.int32)


def follow(cache, handle, tokens, uses=1):
    """As `insert` of tokens after the handle's path; the pages offered last."""
    keys, whole = cache.keys(tokens)
    pages = np.arange(100, 100 + len(keys), dtype=np.int32)
    result = (*cache.tree.insert(keys, whole, pages, "", handle, uses), pages)
    cache.tree.check()
    return result


def test_leaf_of_one_sequence_grows_in_place(harness):
    cache = harness(PAGE)
    handle, *_, first = cache.insert(text("a", "b"))
    longer, existing, stored, second = follow(cache, handle, text("c", "d"))
    assert longer is handle
    assert (existing, stored, handle.num_pages, cache.tree.num_handles) == (0, 2, 4, 1)
    (node,) = cache.nodes()
    assert node.pages.tolist() == [*first.tolist(), *second.tolist()]
    assert cache.match(text("a", "b", "c", "d")).pages.tolist() == node.pages.tolist()
    cache.tree.unlock(handle)
    assert cache.tree.num_evictable == 4


def test_growth_counts_as_so_many_uses_of_what_came_first(harness):
    cache = harness(PAGE)
    handle, *_ = cache.insert(text("a"))
    follow(cache, handle, text("b"), uses=3)
    (node,) = cache.nodes()
    assert (node.created, node.last_used) == (1, 4)


def test_below_what_others_use_a_node_of_its_own_is_stored(harness):
    cache = harness(PAGE)
    cache.store(text("a", "b"))
    handle = cache.lock(text("a", "b"))
    longer, existing, stored, _ = follow(cache, handle, text("c"))
    assert (existing, stored, longer.num_pages, cache.tree.num_handles) == (0, 1, 3, 1)
    assert [node.num_pages for node in cache.nodes()] == [2, 1]
    with pytest.raises(InvariantError, match="must be locked"):
        follow(cache, handle, text("d"))


def test_pages_that_are_there_already_are_found_after_a_handle_too(harness):
    cache = harness(PAGE)
    cache.store(text("a", "b", "c"))
    handle = cache.lock(text("a"))
    longer, existing, stored, _ = follow(cache, handle, text("b", "x"))
    assert (existing, stored, longer.num_pages) == (1, 2, 3)


@pytest.mark.parametrize("remembers", [False, True])
def test_a_page_is_settled_if_evictions_cannot_change_how_it_is_stored(harness, remembers):
    cache = harness(PAGE, GdsfEvictor(PAGE, 0.0) if remembers else None)
    a, b, c = (cache.keys(text(letter))[0].item(0) for letter in "abc")
    assert cache.tree.settled(None, a, "") is not remembers, "a first page is a new node"
    own, *_ = cache.insert(text("a"))
    assert cache.tree.settled(own, b, ""), "a leaf of its own grows"
    cache.store(text("a", "b"))
    assert not cache.tree.settled(own, b, ""), "the page is there, and may be evicted"
    assert cache.tree.settled(own, c, "") is not remembers
