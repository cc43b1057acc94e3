"""Least recently used leaf first, as in RadixAttention (arXiv:2312.07104, section 3)."""

import heapq
from itertools import count

from core.hookspecs import hookimpl
from core.queries import EvictorQuery
from plugins.shared.cache_protocols import CacheNode


class Lru:
    """Evicts the leaf whose last hit or insertion is the longest ago."""

    @hookimpl
    def build_evictor(self, query: EvictorQuery) -> "LruEvictor":
        """An order of its own for one cache."""
        return LruEvictor()


class LruEvictor:
    """A heap of (last_used, serial, node) with at most one entry a node.

    A node that is locked stays in the heap and is skipped when it comes up; one that was used
    meanwhile is put back at its new place. Both are right because last_used only grows: an entry
    never comes too late.
    """

    remembers = False

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, CacheNode]] = []
        self._in_heap: set[CacheNode] = set()
        self._evictable: set[CacheNode] = set()
        self._serial = count()

    def __len__(self) -> int:
        """Nodes on offer."""
        return len(self._evictable)

    def on_insert(self, node: CacheNode) -> None:
        """Nothing: a new node is not on offer yet."""

    def on_extend(self, node: CacheNode) -> None:
        """Nothing: a locked node is ranked when it comes back."""

    def on_hit(self, node: CacheNode) -> None:
        """Nothing: a hit node is locked, and ranked again when it comes back."""

    def on_lock(self, node: CacheNode) -> None:
        """Take a node off offer."""
        self._evictable.remove(node)

    def on_unlock(self, node: CacheNode) -> None:
        """Put a node on offer; O(log n)."""
        self._evictable.add(node)
        if node not in self._in_heap:
            self._push(node)

    def pop(self) -> CacheNode:
        """Take the node with the oldest use; O(log n) a call, averaged over the locks that made
        entries stale. Raises LookupError if none is on offer."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            self._in_heap.remove(node)
            if node not in self._evictable:
                continue
            if last_used == node.last_used:
                self._evictable.remove(node)
                return node
            self._push(node)
        raise LookupError("no evictable node")

    def _push(self, node: CacheNode) -> None:
        heapq.heappush(self._heap, (node.last_used, next(self._serial), node))
        self._in_heap.add(node)
