"""The leaves on offer in the order of a rank: the part that most evictors share."""

import heapq
from itertools import count
from typing import Any, Generic, TypeVar

from plugins.shared.cache_protocols import CacheNode

SLACK = 64  # stale entries that a small heap may hold
N = TypeVar("N", bound=CacheNode)


class LeafHeap(Generic[N]):
    """A heap of (rank, serial, node). A node's rank stands while it is on offer.

    What is withdrawn stays behind as a stale entry, is skipped when it comes up, and goes when the
    stale are more than half: O(log n) a call, averaged. Equal ranks come out in order of offer.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, N]] = []
        self._offered: dict[N, int] = {}  # node -> serial of its entry
        self._serial = count()

    def __len__(self) -> int:
        """Nodes on offer."""
        return len(self._offered)

    def offer(self, node: N, rank: Any) -> None:
        """Put a node on offer; the smallest rank goes first."""
        serial = next(self._serial)
        self._offered[node] = serial
        heapq.heappush(self._heap, (rank, serial, node))
        if len(self._heap) > 2 * len(self._offered) + SLACK:
            self._heap = [entry for entry in self._heap if self._stands(entry)]
            heapq.heapify(self._heap)

    def withdraw(self, node: N) -> None:
        """Take a node off offer. Raises KeyError for one that is not on it."""
        del self._offered[node]

    def first(self) -> tuple[Any, N]:
        """(rank, node) of the next to go, still on offer. Raises LookupError if none is."""
        while self._heap:
            if self._stands(self._heap[0]):
                rank, _, node = self._heap[0]
                return rank, node
            heapq.heappop(self._heap)
        raise LookupError("no evictable node")

    def pop(self) -> tuple[Any, N]:
        """Take the first off offer: (rank, node). Raises LookupError if none is on it."""
        rank, node = self.first()
        heapq.heappop(self._heap)
        del self._offered[node]
        return rank, node

    def _stands(self, entry: tuple[Any, int, N]) -> bool:
        return self._offered.get(entry[2]) == entry[1]
