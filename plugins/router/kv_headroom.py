"""KV headroom: the replica that would have most memory left.

Llumnix (Sun et al., OSDI 2024) dispatches to the instance with the most free memory once its
queue's demand is counted off; here the supply is what a prefix cache makes of it:

headroom = free + evictable - promised - needed    (tokens)

promised: what its requests, running, waiting and on their way, will still take to their expected
ends. needed: this request's prompt and expected output, less what the replica has of it cached.
Below zero it says by how much memory is oversold. A cached prefix counts as memory that is there,
so the rule prefers it as long as the load differs by less.

A replica hotter than hot_c goes behind all that are not, since it may throttle; one that does not
tell its temperature is not hot.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery, pages_needed


class KvHeadroom:
    """Most headroom first, among equals the one with fewer requests. hot_c: degrees Celsius; data
    centre GPUs slow down from some 85 to 90 on."""

    def __init__(self, hot_c: float = 85.0) -> None:
        require(hot_c > 0, "hot_c", "> 0", hot_c)
        self.hot_c = hot_c

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: headroom in tokens."""
        rows, headroom = query.replicas, headroom_tokens(query)
        hot = rows.temperature_c > self.hot_c  # False for NaN
        best = int(np.lexsort((rows.requests, -headroom, hot))[0])
        reason = "most KV headroom" + (", though hot" if hot[best] else "")
        return RouteDecision(rows.ids[best], headroom.astype(np.float64), reason)


def headroom_tokens(query: RouteQuery) -> NDArray[np.int64]:
    """Tokens that each replica would have to spare with this request, int64 [replicas]."""
    rows = query.replicas
    pages = rows.pages_free + rows.pages_evictable - rows.pages_promised - pages_needed(query)
    tokens: NDArray[np.int64] = pages * rows.page_size + query.cached_tokens()
    return tokens
