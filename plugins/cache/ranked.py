"""An evictor for rules in which a leaf's own facts say when it goes."""

from collections.abc import Callable

from plugins.cache.leaf_heap import LeafHeap
from plugins.shared.cache_protocols import CacheNode


class RankedEvictor:
    """Evicts the leaf of the smallest rank. rank(node): worked out each time that the node comes on
    offer; numbers or a tuple of them. Every call costs O(log n) at most, averaged."""

    remembers = False

    def __init__(self, rank: Callable[[CacheNode], tuple[int, ...]]) -> None:
        self._rank = rank
        self._heap: LeafHeap[CacheNode] = LeafHeap()

    def __len__(self) -> int:
        """Nodes on offer."""
        return len(self._heap)

    def on_insert(self, node: CacheNode) -> None:
        """Nothing: a new node is not on offer yet."""

    def on_extend(self, node: CacheNode) -> None:
        """Nothing: a locked node is ranked when it comes back."""

    def on_hit(self, node: CacheNode) -> None:
        """Nothing: a hit node is locked, and ranked again when it comes back."""

    def on_lock(self, node: CacheNode) -> None:
        """Take a node off offer."""
        self._heap.withdraw(node)

    def on_unlock(self, node: CacheNode) -> None:
        """Put a node on offer at its present rank."""
        self._heap.offer(node, self._rank(node))

    def pop(self) -> CacheNode:
        """Take the node of the smallest rank. Raises LookupError if none is on offer."""
        return self._heap.pop()[1]
