"""Segmented LRU: leaves that were hit often enough are protected from those that were not.

As SGLang's `slru`: two segments by hits, LRU within each, everything probationary before anything
protected. The textbook's protected segment (Karedla et al., 1994) is of bounded size and sends its
oldest back; this one is not bounded, so what earned its place once keeps it while others have not.
"""

from core.config import require
from core.hookspecs import hookimpl
from core.queries import EvictorQuery
from plugins.cache.ranked import RankedEvictor
from plugins.shared.cache_protocols import CacheNode


class Slru:
    """Evicts by (hits >= protected_hits, last use)."""

    def __init__(self, protected_hits: int = 2) -> None:
        require(protected_hits >= 1, "protected_hits", ">= 1", protected_hits)
        self.protected_hits = protected_hits

    @hookimpl
    def build_evictor(self, query: EvictorQuery) -> RankedEvictor:
        """An order of its own for one cache."""
        return RankedEvictor(self._rank)

    def _rank(self, node: CacheNode) -> tuple[int, ...]:
        return (int(node.hits >= self.protected_hits), node.last_used)
