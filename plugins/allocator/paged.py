"""Paged allocation (PagedAttention, arXiv:2309.06180): any free page serves any request."""

import numpy as np

from core.errors import InvariantError
from core.hookspecs import hookimpl
from core.protocols import Pages
from core.queries import AllocatorQuery
from plugins.allocator.page_flags import PageFlags, count_pages, require_page_size


class Paged:
    """Hands out single pages from a stack of free ones, the latest freed first.

    page_size: tokens a page, a power of two; 1 makes every token slot a page of its own.
    """

    def __init__(self, page_size: int = 16) -> None:
        require_page_size(page_size)
        self._page_size = page_size

    @hookimpl
    def build_allocator(self, query: AllocatorQuery) -> "PagedAllocator":
        """An allocator over `query.pool_tokens`. Raises ConfigError for a pool of broken pages."""
        return PagedAllocator(count_pages(query.pool_tokens, self._page_size), self._page_size)


class PagedAllocator:
    """A stack of free page ids; `allocate` and `free` are linear in the pages they move."""

    shares_pages = True

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = num_pages
        self._flags = PageFlags(num_pages)

    @property
    def num_free(self) -> int:
        """Free pages."""
        return self._num_free

    def reserved_at_admission(self, pages_needed: int, pages_at_most: int) -> int:
        """Nothing: pages are taken as tokens come."""
        return 0

    def can_allocate(self, num_pages: int) -> bool:
        """Whether `num_pages` pages are free."""
        return num_pages <= self._num_free

    def allocate(self, num_pages: int) -> Pages | None:
        """Take `num_pages` pages, int32, or None if fewer are free."""
        if num_pages < 0:
            raise ValueError(f"num_pages must be >= 0, got {num_pages}")
        if num_pages > self._num_free:
            return None
        rest = self._num_free - num_pages
        pages = self._stack[rest : self._num_free][::-1].copy()
        self._flags.take(pages)
        self._num_free = rest
        return pages

    def free(self, pages: Pages) -> None:
        """Give pages back. Raises InvariantError, and changes nothing, unless all are taken and
        distinct."""
        given = self._flags.give_back(pages)
        total = self._num_free + len(given)
        self._stack[self._num_free : total] = given[::-1]
        self._num_free = total

    def unusable_pages(self, num_pages: int) -> int:
        """Always 0: a request needs no run of pages."""
        return 0

    def check(self) -> None:
        """Raise InvariantError unless the stack holds exactly the pages flagged free; linear in the
        pool."""
        stacked = np.sort(self._stack[: self._num_free])
        flagged = np.flatnonzero(self._flags.is_free)
        if not np.array_equal(stacked, flagged):
            raise InvariantError(
                f"the free stack must hold the {len(flagged)} pages flagged free,"
                f" got {len(stacked)} others"
            )
