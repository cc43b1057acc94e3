"""What an evictor hears of the tree, and the leaves it may choose from."""

from core.errors import PolicyError
from plugins.cache.radix_node import Node
from plugins.shared.cache_protocols import Evictor


class LeafOffers:
    """An evictor with the unlocked leaves that are on offer to it: those marked `evictable`.
    evenly: it does not remember when leaves came."""

    def __init__(self, evictor: Evictor) -> None:
        self.evenly = not getattr(evictor, "remembers", True)
        self.inserted, self.hit = evictor.on_insert, evictor.on_hit
        self._evictor = evictor
        self._on_extend = getattr(evictor, "on_extend", None)

    def offer(self, leaf: Node) -> None:
        """It has no locks any more."""
        leaf.evictable = True
        self._evictor.on_unlock(leaf)

    def withdraw(self, leaf: Node) -> None:
        """It is locked, or a leaf no more."""
        leaf.evictable = False
        self._evictor.on_lock(leaf)

    def extended(self, leaf: Node) -> None:
        """A leaf that one handle uses grew in place."""
        if self._on_extend is not None:
            self._on_extend(leaf)

    def take(self, num_evictable: int) -> Node:
        """The leaf to go next, no longer on offer. Raises PolicyError for an evictor that offers
        none, or what is not on offer; num_evictable: pages that it could have chosen."""
        name = type(self._evictor).__name__
        try:
            leaf = self._evictor.pop()
        except LookupError as error:
            raise PolicyError(
                f"{name}.pop must offer one of {num_evictable} evictable pages"
            ) from error
        if not isinstance(leaf, Node) or not leaf.evictable:
            raise PolicyError(f"{name}.pop must return an evictable leaf, got {leaf!r}")
        leaf.evictable = False
        return leaf
