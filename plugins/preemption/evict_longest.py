"""Longest output so far goes first: few victims free many pages, at the highest sunk cost.

The mirror image of `evict_shortest`, kept to show what that rule is worth: whoever has run longest
pays, and is often nearly done.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class EvictLongest:
    """Victims by most emitted tokens, ties by longest prompt, then by latest admission."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        order = np.lexsort((-rows.admitted_order, -rows.prompt, -rows.emitted))
        return PreemptionDecision(rows.id[order], "most generated, then longest prompt")
