"""KV headroom: the replica whose memory is largest beside what is to come into it.

Llumnix (Sun et al., OSDI 2024) dispatches to the instance with the most free memory once its
queue's demand is counted off; here the supply is what a prefix cache makes of it, and headroom is a
ratio:

headroom = (free + evictable) / (promised + needed)    (tokens / tokens)

promised: what its requests, running, waiting and on their way, will still take to their expected
ends. Where prompts are long, that is mostly prefill still to be computed: the queue in front.
needed: this request's prompt and expected output, less what the replica has of it cached. Below 1
the memory is oversold.

A difference would not know what is much: beside the pages that others hold, in a pool that has room
for them, a prefix in the cache and a queue in front weigh little, though they decide when the first
token comes. A ratio weighs what is there against what is to come, whatever the size of the pool.

What a request that has not ended is still computing is cached for nobody: a second one that comes
meanwhile computes it again beside it. So `needed` is reduced by computed_tokens, not cached_tokens.

A replica hotter than hot_c goes behind all that are not, since it may throttle; one that does not
tell its temperature is not hot.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery, pages_needed


class KvHeadroom:
    """Most headroom first, among equals the one with least demand, then with fewer requests. hot_c:
    degrees Celsius; data centre GPUs slow down from some 85 to 90 on."""

    def __init__(self, hot_c: float = 85.0) -> None:
        require(hot_c > 0, "hot_c", "> 0", hot_c)
        self.hot_c = hot_c

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: headroom, supply / demand."""
        rows, demand = query.replicas, demand_tokens(query, query.computed_tokens())
        headroom = supply_tokens(query) / demand
        hot = rows.temperature_c > self.hot_c  # False for NaN
        best = int(np.lexsort((rows.requests, demand, -headroom, hot))[0])
        reason = "most KV headroom" + (", though hot" if hot[best] else "")
        return RouteDecision(rows.ids[best], headroom, reason)


def supply_tokens(query: RouteQuery) -> NDArray[np.int64]:
    """Tokens that each replica has free or could evict, int64 [replicas]."""
    rows = query.replicas
    tokens: NDArray[np.int64] = (rows.pages_free + rows.pages_evictable) * rows.page_size
    return tokens


def demand_tokens(query: RouteQuery, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens that each replica will take with this request, of whose prompt it holds so many, int64
    [replicas], at least 1."""
    rows = query.replicas
    tokens: NDArray[np.int64] = (rows.pages_promised + pages_needed(query)) * rows.page_size
    return tokens - held
