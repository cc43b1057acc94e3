"""Interfaces between a prefix cache and its evictor, which the core never calls."""

from typing import Protocol


class CacheNode(Protocol):
    """A node of a prefix cache as an evictor sees it. Compare by identity."""

    num_pages: int
    depth_pages: int  # pages from the root up to and including this node
    last_used: int  # the cache's access counter at the last hit or insertion
    created: int
    hits: int


class Evictor(Protocol):
    """Ranks evictable nodes (unlocked leaves). Every call takes constant or logarithmic time.

    A locked node may be joined with its only child and go without a call: hold facts about nodes
    that are not evictable weakly (weakref.WeakKeyDictionary). remembers: what it does depends on
    what was evicted before; without the attribute: it may. `on_extend` may be missing."""

    remembers: bool

    def on_insert(self, node: CacheNode) -> None:
        """A node was created (also by a split)."""

    def on_extend(self, node: CacheNode) -> None:
        """A locked leaf got more pages at its end from the sequence that created it: a use."""

    def on_hit(self, node: CacheNode) -> None:
        """A request was admitted on a prefix that includes the node."""

    def on_lock(self, node: CacheNode) -> None:
        """The node stops being an evictable leaf; called before its facts change."""

    def on_unlock(self, node: CacheNode) -> None:
        """The node became an evictable leaf."""

    def pop(self) -> CacheNode:
        """Remove and return the next victim. The cache may trim it and hand the rest back by
        on_unlock. Raises LookupError if nothing is evictable."""
