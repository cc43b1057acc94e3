"""The contiguous baseline: one run a request, first fit, neighbours coalesce."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError, InvariantError
from core.queries import AllocatorQuery
from plugins.allocator.contiguous import Contiguous, ContiguousAllocator


def build(pool_tokens: int, page_size: int = 1) -> ContiguousAllocator:
    return Contiguous(page_size).build_allocator(AllocatorQuery(pool_tokens, max_model_len=64))


def test_reserves_the_longest_length_and_shares_nothing():
    allocator = build(64)
    assert allocator.reserved_at_admission(3, 40) == 40
    assert not allocator.shares_pages
    assert (allocator.num_pages, allocator.page_size) == (64, 1)


@pytest.mark.parametrize("page_size", [0, 12])
def test_bad_page_size_is_refused(page_size):
    with pytest.raises(ConfigError, match=f"allocator.page_size .*, got {page_size}"):
        Contiguous(page_size)


def test_bad_pool_is_refused():
    with pytest.raises(ConfigError, match=r"engine.pool_tokens .*, got 17"):
        build(17, 16)


def test_allocate_returns_consecutive_pages_of_the_first_run_that_fits():
    allocator = build(12)
    a, b, c = (allocator.allocate(n) for n in (2, 5, 3))
    assert [a.tolist(), b.tolist(), c.tolist()] == [[1, 2], [3, 4, 5, 6, 7], [8, 9, 10]]
    allocator.free(a)
    allocator.free(c)  # coalesces with the free tail: 8 .. 12
    assert allocator.allocate(4).tolist() == [8, 9, 10, 11]
    assert allocator.allocate(2).tolist() == [1, 2]


def test_pages_in_short_runs_cannot_be_had():
    allocator = build(12)
    runs = [allocator.allocate(3) for _ in range(4)]
    allocator.free(runs[0])
    allocator.free(runs[2])
    assert allocator.num_free == 6
    assert not allocator.can_allocate(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 6
    assert [allocator.unusable_pages(n) for n in (3, 4)] == [0, 6]


def test_free_coalesces_with_both_neighbours():
    allocator = build(9)
    left, middle, right = (allocator.allocate(3) for _ in range(3))
    allocator.free(left)
    allocator.free(right)
    assert allocator.unusable_pages(4) == 6
    allocator.free(middle)
    assert allocator.unusable_pages(9) == 0
    assert allocator.allocate(9).tolist() == list(range(1, 10))


def test_free_takes_pages_of_several_runs_in_any_order():
    allocator = build(8)
    allocator.allocate(8)
    allocator.free(np.array([7, 2, 5, 1], np.int32))
    allocator.check()
    assert allocator.unusable_pages(2) == 2
    allocator.free(np.array([8, 3, 4, 6], np.int32))
    assert allocator.can_allocate(8)


@pytest.mark.parametrize("bad", [[4, 5], [4, 4], [0], [9]])
def test_refused_free_changes_nothing(bad):
    allocator = build(8)
    allocator.allocate(4)
    with pytest.raises(InvariantError):
        allocator.free(np.array(bad, np.int32))
    allocator.check()
    assert allocator.num_free == 4


def test_check_finds_runs_that_disagree_with_the_flags():
    allocator = build(8)
    allocator.allocate(2)
    allocator.check()
    allocator._starts[0] += 1
    with pytest.raises(InvariantError, match=r"free runs must be \[\(3, 9\)\], got \[\(4, 9\)\]"):
        allocator.check()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    num_pages=st.integers(1, 40),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 99)), max_size=60),
)
def test_free_plus_used_is_the_total_after_any_sequence(num_pages, moves):
    allocator = build(num_pages)
    held: list[np.ndarray] = []
    used: set[int] = set()
    for takes, count, which in moves:
        if takes:
            pages = allocator.allocate(count)
            free = [page not in used for page in range(1, num_pages + 1)]
            longest = max(map(len, "".join(" x"[f] for f in free).split()), default=0)
            assert (pages is not None) == (count <= longest)
            if pages is not None and count:
                assert used.isdisjoint(pages.tolist())
                assert np.array_equal(pages, np.arange(pages[0], pages[0] + count))
                held.append(pages)
                used.update(pages.tolist())
        elif held:
            pages = held.pop(which % len(held))
            allocator.free(pages)
            used.difference_update(pages.tolist())
        assert allocator.num_free + len(used) == num_pages
        allocator.check()
