"""The paged allocator: distinct pages, exact counts, no double free."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError, InvariantError
from core.queries import AllocatorQuery
from plugins.allocator.paged import Paged, PagedAllocator


def build(pool_tokens: int, page_size: int) -> PagedAllocator:
    return Paged(page_size).build_allocator(AllocatorQuery(pool_tokens, max_model_len=64))


@pytest.mark.parametrize("page_size", [1, 2, 16, 256])
def test_build_covers_the_pool_and_leaves_out_page_0(page_size):
    allocator = build(4 * page_size, page_size)
    assert (allocator.num_pages, allocator.page_size, allocator.num_free) == (4, page_size, 4)
    assert sorted(allocator.allocate(4)) == [1, 2, 3, 4]
    assert allocator.shares_pages
    assert allocator.reserved_at_admission(3, 9) == 0
    assert allocator.unusable_pages(100) == 0


@pytest.mark.parametrize("page_size", [0, -16, 3, 24])
def test_page_size_other_than_a_power_of_two_is_refused(page_size):
    with pytest.raises(ConfigError, match=rf"allocator.page_size .* power of two, got {page_size}"):
        Paged(page_size)


@pytest.mark.parametrize("pool_tokens", [15, 40])
def test_pool_of_broken_pages_is_refused(pool_tokens):
    with pytest.raises(ConfigError, match=rf"engine.pool_tokens .*\(16\).*, got {pool_tokens}"):
        build(pool_tokens, 16)


def test_allocate_beyond_the_free_pages_changes_nothing():
    allocator = build(8, 1)
    taken = allocator.allocate(5)
    assert not allocator.can_allocate(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    rest = allocator.allocate(3)
    assert sorted([*taken, *rest]) == list(range(1, 9))
    assert taken.dtype == np.int32


def test_allocate_of_zero_pages_is_empty_and_of_fewer_raises():
    allocator = build(8, 1)
    assert len(allocator.allocate(0)) == 0
    with pytest.raises(ValueError, match="num_pages must be >= 0, got -1"):
        allocator.allocate(-1)


def test_allocated_pages_survive_later_calls():
    allocator = build(8, 1)
    first, second = allocator.allocate(3), allocator.allocate(5)
    before = second.copy()
    allocator.free(first)
    allocator.free(second)
    assert np.array_equal(second, before)


def test_free_twice_raises_and_later_pages_stay_distinct():
    # K01, LMCache/LMCache#5005: a page freed twice went to two owners.
    allocator = build(16, 16)
    page = allocator.allocate(1)
    allocator.free(page)
    with pytest.raises(InvariantError, match=r"must be taken, got free \[1\]"):
        allocator.free(page)
    first = allocator.allocate(1)
    assert allocator.allocate(1) is None
    assert list(first) == [1]


@pytest.mark.parametrize("bad", [[2, 5], [2, 2], [0], [9], [-1]])
def test_refused_free_changes_nothing(bad):
    allocator = build(8, 1)
    allocator.allocate(4)
    with pytest.raises(InvariantError):
        allocator.free(np.array(bad, np.int32))
    assert allocator.num_free == 4
    allocator.check()
    allocator.free(np.arange(1, 5, dtype=np.int32))
    assert allocator.num_free == 8


def test_check_finds_a_page_lost_from_the_stack():
    allocator = build(8, 1)
    allocator.check()
    allocator._num_free -= 1
    with pytest.raises(InvariantError, match="8 pages flagged free, got 7"):
        allocator.check()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    num_pages=st.integers(1, 40),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_free_plus_used_is_the_total_after_any_sequence(page_size, num_pages, moves):
    allocator = build(num_pages * page_size, page_size)
    held: list[int] = []
    for takes, count in moves:
        if takes:
            fits = count <= num_pages - len(held)
            assert allocator.can_allocate(count) == fits
            pages = allocator.allocate(count)
            assert (pages is not None) == fits
            held += [] if pages is None else pages.tolist()
        else:
            given_back, held = held[:count], held[count:]
            allocator.free(np.array(given_back, np.int32))
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(1, num_pages + 1))
        assert allocator.num_free + len(held) == num_pages
        allocator.check()
