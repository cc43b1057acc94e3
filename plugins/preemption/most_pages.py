"""Whoever holds most pages goes first: the fewest victims for the pages that are short.

The largest-first rule of classic page-frame reclaim (a local policy that takes from the largest
resident set), on requests.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class MostPages:
    """Victims by most pages held, ties by latest admission.

    Pages of a prefix in the cache count too: they come free unless another request holds them."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        order = np.lexsort((-rows.admitted_order, -rows.pages_held))
        return PreemptionDecision(rows.id[order], "most pages held")
