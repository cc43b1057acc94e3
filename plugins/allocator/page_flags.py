"""What both allocators share: checked sizes, and which pages are free."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import InvariantError
from core.protocols import Pages
from core.table import some


def require_page_size(page_size: int) -> None:
    """Raise ConfigError unless `page_size` is a power of two."""
    holds = page_size >= 1 and page_size & (page_size - 1) == 0
    require(holds, "allocator.page_size", "a power of two", page_size)


def count_pages(pool_tokens: int, page_size: int) -> int:
    """Whole pages in a pool. Raises ConfigError if tokens are left over or no page fits."""
    rule = f"a multiple of allocator.page_size ({page_size}) and hold at least one page"
    holds = pool_tokens >= page_size and pool_tokens % page_size == 0
    require(holds, "engine.pool_tokens", rule, pool_tokens)
    return pool_tokens // page_size


class PageFlags:
    """One flag a page, ids 1 .. num_pages: free or taken. Page 0 is never free."""

    def __init__(self, num_pages: int) -> None:
        self.is_free: NDArray[np.bool_] = np.ones(num_pages + 1, np.bool_)
        self.is_free[0] = False

    def take(self, pages: Pages) -> None:
        """Mark pages as taken; the caller knows that they are free."""
        self.is_free.put(pages, False)

    def give_back(self, pages: Pages) -> Pages:
        """Mark pages as free and return them as a fresh int32 array; linear in their number.
        Raises InvariantError, and changes nothing, for an id out of range, free or listed twice."""
        given = np.array(pages, dtype=np.int32)
        last = len(self.is_free) - 1
        outside = given.view(np.uint32) - np.uint32(1) >= last  # no wrong id wraps to a right one
        if some(outside):
            raise InvariantError(
                f"page ids to free must be in 1 .. {last}, got {given[outside].tolist()}"
            )
        already = self.is_free.take(given)
        if some(already):
            raise InvariantError(f"pages to free must be taken, got free {given[already].tolist()}")
        pages_given = given.tolist()
        if len(set(pages_given)) < len(given):
            repeated = [page for page, times in Counter(pages_given).items() if times > 1]
            raise InvariantError(f"pages to free must be distinct, got {repeated} twice")
        self.is_free.put(given, True)
        return given
