"""Least seconds of recomputation for each page that comes free.

The discard term of InferCept (Abhyankar et al., ICML 2024: what a preempted request has computed is
computed again), by the engine's model of step times, against the memory that it gives.
"""

import numpy as np
from numpy.typing import NDArray

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery
from core.table import RequestTable


class CheapestRecompute:
    """Victims by seconds to compute again what they have computed, over pages held; ties by latest
    admission.

    A request's recomputation is one prompt in steps that run anyway: a row, its tokens, its
    context, its pairs of query and key, and no share of a step's fixed time. Cached pages count on
    both sides of the fraction, as if they were lost and came free. Who holds no page goes last."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        cost = _seconds_a_page(rows, query)
        order = np.lexsort((-rows.admitted_order, cost))
        least = cost[order[0]] * 1e6
        reason = f"least recomputation a page, {least:.1f} us the first" if least < np.inf else ""
        return PreemptionDecision(rows.id[order], reason or "nobody holds a page")


def _seconds_a_page(rows: RequestTable, query: PreemptionQuery) -> NDArray[np.float64]:
    tokens = rows.computed.astype(np.float64)
    model = query.step_time
    again = model.seconds(1, tokens, tokens, tokens * (tokens + 1) / 2) - model.seconds(0, 0, 0, 0)
    held = rows.pages_held
    cost: NDArray[np.float64] = np.where(held > 0, again / np.maximum(held, 1), np.inf)
    return cost
