"""LMetric (arXiv:2603.15202): least new prefill work times batch size, without a parameter.

score = (prompt - cached) * (requests + 1)

The first factor is what the request costs there, the second how many it would slow down and wait
for. Either factor alone could be zero and hide the other: a prompt's last token is always computed,
so the first is at least 1; the second counts this request in, or all idle replicas would be alike
however much they hold of the prompt.
"""

import numpy as np

from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery


class LMetric:
    """The least product first, among equals fewer requests."""

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: the products."""
        rows = query.replicas
        work = np.maximum(len(query.request.prompt) - query.cached_tokens(), 1)
        scores = (work * (rows.requests + 1)).astype(np.float64)
        best = int(np.lexsort((rows.requests, scores))[0])
        return RouteDecision(rows.ids[best], scores, "least new tokens times requests")
