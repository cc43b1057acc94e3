"""Least frequently used: the leaf with the fewest hits goes first, among equals the one whose last
use is the longest ago."""

from core.hookspecs import hookimpl
from core.queries import EvictorQuery
from plugins.cache.ranked import RankedEvictor
from plugins.shared.cache_protocols import CacheNode


class Lfu:
    """Evicts by (hits, last use), as SGLang's `lfu`. Hits never age: the once popular stays."""

    @hookimpl
    def build_evictor(self, query: EvictorQuery) -> RankedEvictor:
        """An order of its own for one cache."""
        return RankedEvictor(_rank)


def _rank(node: CacheNode) -> tuple[int, ...]:
    return (node.hits, node.last_used)
