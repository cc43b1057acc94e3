"""Whoever is expected to need least more output goes first: it comes back for a short time only.

Remaining output is the length predictor's answer less what is out; with the predictor `oracle` it
is the truth. The opposite choice, which keeps those about to end running, is `most_remaining`.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class LeastRemaining:
    """Victims by least predicted remaining output, ties by latest admission."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        order = np.lexsort((-rows.admitted_order, rows.predicted_remaining))
        return PreemptionDecision(rows.id[order], "least output left, as predicted")
