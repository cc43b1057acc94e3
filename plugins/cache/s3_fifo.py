"""S3-FIFO (Yang et al., SOSP 2023), its objects being the leaves of the prefix tree.

Two FIFO queues and a ghost list. What is new enters the small queue, or the main one if the ghost
list knows it. While the small queue holds more than its share, its oldest leaves: one that was hit
often enough moves to the end of the main queue, else it goes and the ghost list keeps its name.
Otherwise the main queue's oldest leaves: one that was hit goes back to its end with one hit less
(at most 3 count), else it goes for good.

On a tree:
- A node's place in its queue is drawn when it is created, and it keeps the place while it is locked
  or has children: it is merely passed over. A parent whose last child went is therefore old, and
  follows soon unless it was hit. Both halves of a split node keep the whole one's place.
- The queues' sizes are the pages of the leaves on offer; pages that cannot go count in neither.
- A node's name is the digest of the path to its first page. A leaf that lost only its tail is named
  too, without effect: its head is still there.
- The ghost list has as many names as the main share has leaves on offer, and at least 64.
"""

from collections import OrderedDict
from itertools import count
from typing import NamedTuple

from core.config import require
from core.hookspecs import hookimpl
from core.queries import EvictorQuery
from plugins.cache.leaf_heap import LeafHeap
from plugins.cache.tree_node import TreeNode
from plugins.shared.cache_protocols import CacheNode

FEWEST_NAMES = 64


class S3Fifo:
    """small_share: of the pages on offer, for the small queue. promote_hits: to move to main.
    max_hits: that count. The values are the paper's."""

    def __init__(self, small_share: float = 0.1, promote_hits: int = 2, max_hits: int = 3) -> None:
        require(0 < small_share < 1, "small_share", "in (0, 1)", small_share)
        require(promote_hits >= 1, "promote_hits", ">= 1", promote_hits)
        require(max_hits >= promote_hits, "max_hits", f">= promote_hits = {promote_hits}", max_hits)
        self.small_share = small_share
        self.promote_hits = promote_hits
        self.max_hits = max_hits

    @hookimpl
    def build_evictor(self, query: EvictorQuery) -> "S3FifoEvictor":
        """Queues of its own for one cache."""
        return S3FifoEvictor(self.small_share, self.promote_hits, self.max_hits)


class Place(NamedTuple):
    """A node's memo. hits_before: of its hits, those that no longer count."""

    in_main: bool
    number: int
    hits_before: int


class S3FifoEvictor:
    """Both queues as heaps by place, so that a node finds its place again."""

    remembers = True

    def __init__(self, small_share: float, promote_hits: int, max_hits: int) -> None:
        self._small_share = small_share
        self._promote_hits = promote_hits
        self._max_hits = max_hits
        self._queues: list[LeafHeap[TreeNode]] = [LeafHeap(), LeafHeap()]  # small, main
        self._pages = [0, 0]  # on offer in each
        self._numbers = count()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Nodes on offer."""
        return len(self._queues[0]) + len(self._queues[1])

    def on_insert(self, node: TreeNode) -> None:
        """Give a new node its place; half of a split one has it."""
        if node.memo is None:
            name = node.head_digest
            known = name in self._ghost
            if known:
                del self._ghost[name]
            node.memo = Place(known, next(self._numbers), node.hits)

    def on_extend(self, node: TreeNode) -> None:
        """Nothing: it came with its first pages."""

    def on_hit(self, node: TreeNode) -> None:
        """Nothing: the node counts its hits."""

    def on_lock(self, node: TreeNode) -> None:
        """Take a node off offer; its place stays."""
        self._queues[node.memo.in_main].withdraw(node)
        self._pages[node.memo.in_main] -= node.num_pages

    def on_unlock(self, node: TreeNode) -> None:
        """Put a node on offer at its place; O(log n)."""
        self._queues[node.memo.in_main].offer(node, node.memo.number)
        self._pages[node.memo.in_main] += node.num_pages

    def pop(self) -> CacheNode:
        """Take the next victim. O(log n) averaged: a node is moved at most once for each hit that
        it had. Raises LookupError if none is on offer."""
        while True:
            in_main = self._pages[0] <= self._small_share * sum(self._pages)
            in_main = (bool(self._queues[1]) and in_main) or not self._queues[0]
            _, node = self._queues[in_main].pop()
            self._pages[in_main] -= node.num_pages
            if not self._moved(node):
                return node

    def _moved(self, node: TreeNode) -> bool:
        """Whether its hits save a node that was taken from the head of its queue."""
        place: Place = node.memo
        hits = min(node.hits - place.hits_before, self._max_hits)
        if place.in_main and hits > 0:
            node.memo = Place(True, next(self._numbers), node.hits - (hits - 1))
        elif not place.in_main and hits >= self._promote_hits:
            node.memo = Place(True, next(self._numbers), node.hits)
        else:
            if not place.in_main:
                self._remember(node.head_digest)
            return False
        self.on_unlock(node)
        return True

    def _remember(self, name: int) -> None:
        self._ghost[name] = None
        self._ghost.move_to_end(name)
        most = max(FEWEST_NAMES, int((1 - self._small_share) * len(self)))
        while len(self._ghost) > most:
            self._ghost.popitem(last=False)
