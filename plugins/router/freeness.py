"""Freeness: the replica with most KV headroom for each request that it serves.

Llumnix (Sun et al., OSDI 2024): freeness = (memory - virtual usage) / batch size, the most free
instance takes the request; the batch size tells how fast memory is used up. Virtual usage is here
plugins/router/kv_headroom.py's demand, this request included, and so is it in the batch; whatever
is thought cached counts, computed or on its way.
Below zero more requests make it worse: there headroom is multiplied by them.
"""

import numpy as np

from core.hookspecs import hookimpl
from plugins.router.kv_headroom import demand_tokens, supply_tokens
from plugins.shared.routing import RouteDecision, RouteQuery


class Freeness:
    """Most freeness first, among equals the one with fewer requests."""

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: freeness in tokens a request."""
        rows, cached = query.replicas, query.cached_tokens()
        headroom = supply_tokens(query) - demand_tokens(query, cached)
        batch = rows.requests + 1
        scores = np.where(headroom > 0, headroom / batch, headroom * batch).astype(np.float64)
        best = int(np.lexsort((rows.requests, -scores))[0])
        return RouteDecision(rows.ids[best], scores, "most KV headroom a request")
