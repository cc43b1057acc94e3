"""SRPT with limited preemption (TRAIL, Shahout et al., ICLR 2025, arXiv:2410.01035).

Order: least predicted remaining output. A waiting request may displace running ones that have more
left, but only those still young: with `emitted < preemptible_share * predicted total`. A request
near its end holds the most KV and would soon give it back; sending it away then costs most. TRAIL
predicts from the model's own layers at each token; here the run's length predictor does, once, so
`remaining` is the prediction less what was emitted.

Two never push each other out in turns: the one that displaced had less left and, while it runs,
has less and less.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Cause, OrderDecision, OrderQuery, PreemptionDecision, PreemptionQuery


class Trail:
    """preemptible_share: the paper's c. 0 = displace nobody (SRTF), 1 = plain SRPT."""

    starves = "long requests wait while shorter ones keep coming"

    displaces = True

    def __init__(self, preemptible_share: float = 0.8) -> None:
        require(0 <= preemptible_share <= 1, "preemptible_share", "in [0, 1]", preemptible_share)
        self.preemptible_share = preemptible_share

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Least predicted remaining output first."""
        waiting = query.waiting
        keys = np.stack([waiting.predicted_remaining, waiting.arrival_s], axis=1)
        return OrderDecision(keys, reason="shortest predicted remaining output")

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision:
        """The young first, most predicted remaining first; for a beneficiary only the young that
        have more left than it, for pages the others after them."""
        rows = query.candidates
        left = rows.predicted_remaining
        total = np.minimum(rows.predicted_output, rows.max_output)
        young = rows.emitted < self.preemptible_share * total
        order = np.lexsort((-rows.admitted_order, -left, ~young))
        if query.cause is not Cause.PAGES and query.beneficiary is not None:
            gives_way = young & (left > query.beneficiary.predicted_remaining[0])
            order = order[gives_way[order]]
        return PreemptionDecision(rows.id[order], "most predicted remaining output, young first")
