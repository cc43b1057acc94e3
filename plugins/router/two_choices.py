"""The power of two choices (Mitzenmacher, IEEE TPDS 12(10), 2001): two at random, the less loaded.

With n requests on n replicas the fullest has log log n + O(1) instead of log n / log log n, and
with figures that are old the choice does not herd to whoever looked idle.
"""

import numpy as np

from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery


class TwoChoices:
    """Two different replicas drawn from the run's seed; the one with fewer unfinished requests,
    among equals the one drawn first."""

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: unfinished requests, of all."""
        rows = query.replicas
        drawn = query.random.choice(len(rows), min(len(rows), 2), replace=False)
        best = int(drawn[np.argmin(rows.requests[drawn])])
        reason = f"the less loaded of {' and '.join(rows.ids[one] for one in drawn.tolist())}"
        return RouteDecision(rows.ids[best], rows.requests.astype(np.float64), reason)
