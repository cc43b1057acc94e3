"""Contiguous allocation, the baseline before paging: one run for the longest possible length.

First fit over free runs in address order; neighbours coalesce when freed (Knuth, The Art of
Computer Programming, vol. 1, section 2.5).
"""

from bisect import bisect_left, bisect_right

import numpy as np

from core.errors import InvariantError
from core.hookspecs import hookimpl
from core.protocols import Pages
from core.queries import AllocatorQuery
from plugins.allocator.page_flags import PageFlags, count_pages, require_page_size


class Contiguous:
    """Reserves a request's maximum length on admission, as one run of pages.

    page_size: tokens a page, a power of two; 1 is the baseline's token slot.
    """

    def __init__(self, page_size: int = 1) -> None:
        require_page_size(page_size)
        self._page_size = page_size

    @hookimpl
    def build_allocator(self, query: AllocatorQuery) -> "ContiguousAllocator":
        """An allocator over `query.pool_tokens`. Raises ConfigError for a pool of broken pages."""
        return ContiguousAllocator(count_pages(query.pool_tokens, self._page_size), self._page_size)


class ContiguousAllocator:
    """Free runs in address order: run i is pages _starts[i] .. _ends[i] - 1, and no two runs touch.

    Calls cost the number of free runs: at most the number of requests that hold pages, plus one.
    """

    shares_pages = False

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._num_free = num_pages
        self._starts = [1]
        self._ends = [num_pages + 1]
        self._flags = PageFlags(num_pages)

    @property
    def num_free(self) -> int:
        """Free pages, in runs of any length."""
        return self._num_free

    def reserved_at_admission(self, pages_needed: int, pages_at_most: int) -> int:
        """The whole of the longest possible length."""
        return pages_at_most

    def can_allocate(self, num_pages: int) -> bool:
        """Whether a run of `num_pages` pages is free."""
        return num_pages == 0 or self._first_fit(num_pages) is not None

    def allocate(self, num_pages: int) -> Pages | None:
        """Take consecutive pages, int32 ascending, from the first run that holds them, or None."""
        if num_pages < 0:
            raise ValueError(f"num_pages must be >= 0, got {num_pages}")
        if num_pages == 0:
            return np.empty(0, np.int32)
        run = self._first_fit(num_pages)
        if run is None:
            return None
        start = self._starts[run]
        pages = np.arange(start, start + num_pages, dtype=np.int32)
        if start + num_pages == self._ends[run]:
            del self._starts[run], self._ends[run]
        else:
            self._starts[run] = start + num_pages
        self._flags.take(pages)
        self._num_free -= num_pages
        return pages

    def free(self, pages: Pages) -> None:
        """Give pages back, in any order. Raises InvariantError, and changes nothing, unless all are
        taken and distinct."""
        given = np.sort(self._flags.give_back(pages))
        if len(given) == 0:
            return
        breaks = np.flatnonzero(np.diff(given) != 1)
        starts = given[np.concatenate(([0], breaks + 1))].tolist()
        ends = (given[np.concatenate((breaks, [len(given) - 1]))] + 1).tolist()
        for start, end in zip(starts, ends, strict=True):
            self._add_run(start, end)
        self._num_free += len(given)

    def unusable_pages(self, num_pages: int) -> int:
        """Free pages in runs shorter than `num_pages`."""
        lengths = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        return sum(length for length in lengths if length < num_pages)

    def check(self) -> None:
        """Raise InvariantError unless the runs are apart and cover the free pages; linear in the
        pool."""
        padded = np.concatenate((self._flags.is_free, [False])).astype(np.int8)
        edges = np.diff(padded)
        starts = (np.flatnonzero(edges == 1) + 1).tolist()
        ends = (np.flatnonzero(edges == -1) + 1).tolist()
        if starts != self._starts or ends != self._ends:
            runs = list(zip(self._starts, self._ends, strict=False))
            raise InvariantError(
                f"free runs must be {list(zip(starts, ends, strict=True))}, got {runs}"
            )
        if self._num_free != int(padded.sum()):
            raise InvariantError(f"num_free must be {int(padded.sum())}, got {self._num_free}")

    def _first_fit(self, num_pages: int) -> int | None:
        for run, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= num_pages:
                return run
        return None

    def _add_run(self, start: int, end: int) -> None:
        # The flags vouch that the run overlaps no free one: only its two neighbours can touch it.
        left = bisect_right(self._ends, start) - 1
        if left >= 0 and self._ends[left] == start:
            start = self._starts[left]
            del self._starts[left], self._ends[left]
        right = bisect_left(self._starts, end)
        if right < len(self._starts) and self._starts[right] == end:
            end = self._ends[right]
            del self._starts[right], self._ends[right]
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, end)
