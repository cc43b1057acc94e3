"""Least urgent first, for pages and for a strictly more urgent request that waits for pages or a
slot.

Equal priority never displaces: with arrival as a tie-break two equals would push each other out for
ever.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class PreemptLowestPriority:
    """Victims by largest priority number, then latest admission. Use with the order `priority`."""

    displaces = True

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank candidates; for a beneficiary only those strictly less urgent than it."""
        rows = query.candidates
        order = np.lexsort((-rows.admitted_order, -rows.priority))
        if query.cause is not Cause.PAGES and query.beneficiary is not None:
            order = order[rows.priority[order] > query.beneficiary.priority[0]]
        return PreemptionDecision(rows.id[order], "least urgent first")
