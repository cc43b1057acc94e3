"""Whoever was preempted least so far goes first: the cost is spread, nobody is hit again and again.

Under pressure a fixed rule returns to the same requests, and whoever is hit most has the worst
latency. By count, nobody is hit a second time while someone runs who was not hit at all.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class FewestPreempted:
    """Victims by fewest preemptions, ties by latest admission."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        order = np.lexsort((-rows.admitted_order, rows.preemptions))
        return PreemptionDecision(rows.id[order], "preempted least, then admitted last")
