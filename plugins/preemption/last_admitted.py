"""Last admitted, first preempted: vLLM's victim. Keeps the order of service that admission set."""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class LastAdmitted:
    """Victims by admission, latest first. Displaces nobody."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        order = np.argsort(-query.candidates.admitted_order)
        return PreemptionDecision(query.candidates.id[order], "admitted last")
