"""Join the shortest queue: the replica with the fewest requests that have not ended.

The textbook rule on counts (Vidur calls it LOR, least outstanding requests). The router's own
counts are exact at any time; a long prompt counts as much as a short one.
"""

import numpy as np

from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery


class LeastLoaded:
    """Fewest unfinished requests first, among equals the one that joined first."""

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: unfinished requests."""
        rows = query.replicas
        best = int(np.argmin(rows.requests))
        return RouteDecision(rows.ids[best], rows.requests.astype(np.float64), "fewest requests")
