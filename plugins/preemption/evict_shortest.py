"""Shortest output so far goes first: the least sunk cost; among equals the longest prompt, which
frees most.

SGLang's retraction order (sglang `ScheduleBatch.retract_decode`), restated: victims by fewest
generated tokens, then by longest prompt.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class EvictShortest:
    """Victims by fewest emitted tokens, ties by longest prompt, then by latest admission."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        order = np.lexsort((-rows.admitted_order, -rows.prompt, rows.emitted))
        return PreemptionDecision(rows.id[order], "fewest generated, then longest prompt")
