"""Whoever is expected to need most more output goes first, so that those about to end do end and
give their pages back: shortest remaining time first (Schrage 1968), seen from the victim's side.

Remaining output is the length predictor's answer less what is out; with the predictor `oracle` it
is the truth.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class MostRemaining:
    """Victims by most predicted remaining output, ties by latest admission."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        order = np.lexsort((-rows.admitted_order, -rows.predicted_remaining))
        return PreemptionDecision(rows.id[order], "most output left, as predicted")
