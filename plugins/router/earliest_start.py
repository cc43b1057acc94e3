"""An oracle: the replica that would truly start to answer first, by what the simulation knows.

Greedy, not optimal: it looks at this request alone. plugins/mode/true_starts.py says how the time
is worked out. Only a simulation can answer, and the run is labelled.
"""

import numpy as np

from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery


class EarliestStart:
    """The earliest start first, among equals fewer requests."""

    oracle = True

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: seconds to the first token. Raises PolicyError outside of a simulation."""
        rows, starts = query.replicas, query.earliest_starts()
        best = int(np.lexsort((rows.requests, starts))[0])
        return RouteDecision(rows.ids[best], starts, "would start first")
