"""Shortest remaining time first: by the output that is still expected.

It differs from `sjf` for preempted requests, which have part of their output already. It displaces
nobody: `trail` does. With the predictor `oracle` it is SRTF with true lengths, the best simple
order, and no bound where requests are batched and memory is short.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import OrderDecision, OrderQuery


class Srtf:
    """Keys: predicted output less what was emitted (at least 1), then arrival."""

    starves = "long requests wait while shorter ones keep coming"

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Least remaining first; a waiting request emits nothing, so its key stands."""
        waiting = query.waiting
        keys = np.stack([waiting.predicted_remaining, waiting.arrival_s], axis=1)
        return OrderDecision(keys, reason="shortest predicted remaining output")
