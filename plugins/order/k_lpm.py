"""k-LPM: the oldest request, then the k - 1 with the longest cached prefix, and so on (Dexter et
al., NeurIPS 2025, arXiv:2502.04677).

Longest prefix first starves requests without a match; first come, first served throws away the
cache. Serving the oldest every k-th time bounds the wait of each by k times its place in the queue.
k = 1 is first come, first served; a k above the queue's length is longest prefix first but for one.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Hold, OrderDecision, OrderQuery
from plugins.order.prefixes import by_arrival, cached_tokens


class KLpm:
    """k: starts in a round, of which the first goes to the oldest. window: how many of the oldest
    are matched with the cache in a step; later ones count as if they had no match.

    A round goes on from step to step: it advances by those that left the queue since the last."""

    def __init__(self, k: int = 8, window: int = 128) -> None:
        require(k >= 1, "k", ">= 1", k)
        require(window >= 1, "window", ">= 1", window)
        self.k = k
        self.window = window
        self._waited: set[int] = set()
        self._served = 0  # in the round

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """The order of service, from this point of the round; for this step alone."""
        waiting = set(query.waiting.id.tolist())
        self._served = (self._served + len(self._waited - waiting)) % self.k
        self._waited = waiting
        oldest = by_arrival(query)
        cached = cached_tokens(query, oldest[: self.window])
        longest = oldest[np.argsort(-cached[oldest], kind="stable")]
        keys = np.empty(len(oldest))
        keys[self._merged(oldest, longest)] = np.arange(len(oldest))
        return OrderDecision(keys, Hold.STEP, f"{self._served} of {self.k} served of the round")

    def _merged(self, oldest: NDArray[np.int64], longest: NDArray[np.int64]) -> list[int]:
        """Rows in order: the first left of `oldest` at each round's start, else of `longest`."""
        lines = oldest.tolist(), longest.tolist()
        heads, taken, order = [0, 0], np.zeros(len(oldest), np.bool_), []
        for place in range(self._served, self._served + len(oldest)):
            line = 0 if place % self.k == 0 else 1
            while taken[lines[line][heads[line]]]:
                heads[line] += 1
            row = lines[line][heads[line]]
            taken[row] = True
            order.append(row)
        return order
