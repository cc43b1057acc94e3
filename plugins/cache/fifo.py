"""First in, first out: the leaf that entered the cache first goes first, used or not."""

from core.hookspecs import hookimpl
from core.queries import EvictorQuery
from plugins.cache.ranked import RankedEvictor
from plugins.shared.cache_protocols import CacheNode


class Fifo:
    """Evicts the oldest leaf (SGLang's `fifo`). Pages that a sequence adds while it runs entered
    with its first ones."""

    @hookimpl
    def build_evictor(self, query: EvictorQuery) -> RankedEvictor:
        """An order of its own for one cache."""
        return RankedEvictor(_rank)


def _rank(node: CacheNode) -> tuple[int, ...]:
    return (node.created,)
