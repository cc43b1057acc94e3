"""Prefix affinity with bounded load: to where the prompt's beginning is, unless that is full.

A request is at home where most of its prompt is cached, if that is a share of it as SGLang's router
asks (0.5), else nowhere. Homes are bounded as in consistent hashing with bounded loads (Mirrokni,
Thorup, Zadimoghaddam, SODA 2018): with m requests on n replicas, this one included, none that has
ceil((1 + slack) * m / n) takes another by affinity; the next best home does. With a few requests a
replica that bound would be 1 or 2 and drive sessions from their caches, so it is at least `floor`:
SGLang's router, too, lets a difference pass that is small in requests. Without a home the
least loaded takes it: the emptiest cache would be the wrong one while its queue is long.

The bound is each replica's own: one that is overloaded sends its requests elsewhere and leaves the
affinity of others alone.
"""

import math

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery


class PrefixAffinity:
    """share: of the prompt that must be cached somewhere to make it a home. slack: epsilon of the
    bound. floor: requests that never make a home full."""

    def __init__(self, share: float = 0.5, slack: float = 0.25, floor: int = 4) -> None:
        require(0 <= share < 1, "share", "in [0, 1)", share)
        require(slack > 0, "slack", "> 0", slack)
        require(floor >= 1, "floor", ">= 1", floor)
        self.share = share
        self.slack = slack
        self.floor = floor

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """Scores: cached tokens."""
        rows, cached = query.replicas, query.cached_tokens()
        scores = cached.astype(np.float64)
        mean = (int(rows.requests.sum()) + 1) / len(rows)
        bound = max(math.ceil((1 + self.slack) * mean), self.floor)
        home = (cached > self.share * len(query.request.prompt)) & (rows.requests < bound)
        if home.any():
            order = np.lexsort((rows.requests, -cached, ~home))
            return RouteDecision(rows.ids[int(order[0])], scores, "holds its prefix")
        best = int(np.argmin(rows.requests))
        full = bool((cached > self.share * len(query.request.prompt)).any())
        reason = f"fewest requests; its homes have {bound} or more" if full else "fewest requests"
        return RouteDecision(rows.ids[best], scores, reason)
