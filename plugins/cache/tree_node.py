"""What the radix tree tells evictors about its nodes beyond CacheNode."""

from typing import Any, Protocol

from plugins.shared.cache_protocols import CacheNode


class TreeNode(CacheNode, Protocol):
    """A node with a place for the evictor's own facts, and a name that outlives it."""

    memo: Any
    """The evictor's, None on a new node. Both halves of a split node start with the whole one's, so
    keep values in it that are never changed in place."""

    @property
    def head_digest(self) -> int:
        """64-bit digest of the path down to and including the node's first page."""
