"""No prefix cache: every request computes all of its tokens."""

from dataclasses import dataclass

import numpy as np

from core.errors import InvariantError
from core.hookspecs import hookimpl
from core.protocols import Keys, Pages, PrefixMatch
from core.queries import PrefixCacheQuery
from plugins.cache.page_run import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class EmptyMatch:
    """A match of nothing."""

    pages: Pages
    num_unlocked_pages: int = 0


class NoCache:
    """Keeps nothing."""

    @hookimpl
    def build_prefix_cache(self, query: PrefixCacheQuery) -> "EmptyCache":
        """A cache that never holds a page."""
        return EmptyCache()


class EmptyCache:
    """Never matches and never stores: all pages stay the caller's."""

    stores = False
    evicts_evenly = True
    num_pages = 0
    num_evictable = 0

    def __init__(self) -> None:
        self._handles: set[object] = set()

    @property
    def num_handles(self) -> int:
        """Handles not given back yet."""
        return len(self._handles)

    def match(self, keys: Keys, tokens: Tokens | None, namespace: str) -> EmptyMatch:
        """No page."""
        return EmptyMatch(_no_pages())

    def lock(self, match: PrefixMatch) -> object:
        """A handle on the empty path."""
        handle = object()
        self._handles.add(handle)
        return handle

    def unlock(self, handle: object) -> None:
        """Give a handle back. Raises InvariantError for one that is not live."""
        if handle not in self._handles:
            raise InvariantError("a handle must be unlocked once, got one that is not locked")
        self._handles.remove(handle)

    def insert(
        self,
        keys: Keys,
        tokens: Tokens | None,
        pages: Pages,
        namespace: str,
        after: object | None = None,
        uses: int = 1,
    ) -> tuple[object, int, int]:
        """A handle on the empty path, 0 pages existing, 0 stored."""
        return self.lock(EmptyMatch(_no_pages())), 0, 0

    def settled(self, handle: object | None, key: int, namespace: str) -> bool:
        """Yes: nothing is stored either way."""
        return True

    def fork(self, handle: object) -> object:
        """Another handle on the empty path."""
        if handle not in self._handles:
            raise InvariantError("a handle to fork must be locked")
        return self.lock(EmptyMatch(_no_pages()))

    def evict(self, num_pages: int) -> Pages:
        """No page."""
        return _no_pages()

    def drop(self, match: PrefixMatch) -> Pages:
        """No page."""
        return _no_pages()

    def clear(self) -> Pages:
        """No page."""
        return _no_pages()

    def check(self) -> None:
        """Nothing is kept, so nothing can be wrong."""


def _no_pages() -> Pages:
    return np.empty(0, np.int32)
