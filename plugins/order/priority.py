"""Urgent first: by the request's priority (smaller is more urgent), then by arrival."""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import OrderDecision, OrderQuery


class Priority:
    """Keys: priority, arrival. Pair it with preempt_priority, which lets the urgent displace the
    others."""

    starves = "while more urgent requests keep coming"

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Smallest priority first; keys never change."""
        waiting = query.waiting
        return OrderDecision(
            np.stack([waiting.priority, waiting.arrival_s], axis=1), reason="priority"
        )
