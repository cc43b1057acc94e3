"""Priority with ageing: each level of priority is worth a fixed time of waiting.

The effective priority falls by one level in `level_s` seconds of waiting. All who wait age alike,
so the order of two never changes and the key is simply `arrival_s + priority * level_s` (textbook
ageing with a linear rate).

Bound: let the most urgent priority in use be m. A request of priority p that arrived at t is
passed by none that arrives after t + (p - m) * level_s; so it waits at most for what arrived before
that moment, which is finite. Displacement by priority (`preempt_priority`) voids the bound.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import OrderDecision, OrderQuery


class PriorityAgeing:
    """level_s: seconds of waiting that make up for one level; 0 = first come, first served."""

    def __init__(self, level_s: float = 10.0) -> None:
        require(0 <= level_s < np.inf, "level_s", ">= 0 and finite", level_s)
        self.level_s = level_s
        self.starvation_bound_s = 9 * level_s  # of priorities 0 to 9

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Earliest arrival first, each level of priority counted as a later one."""
        waiting = query.waiting
        keys = waiting.arrival_s + waiting.priority * self.level_s
        return OrderDecision(keys, reason="priority, aged by waiting")
