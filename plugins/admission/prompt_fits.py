"""The whole prompt must fit, and what running requests are expected to grow by.

Gating on the first chunk alone over-admits: half-computed prompts then preempt one another (vLLM's
`scheduler_reserve_full_isl` exists for that). Growth is the length predictor's estimate.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, AdmissionQuery, Verdict
from plugins.admission.at_once import reserve


class PromptFits:
    """Admit while need + promised + growth <= free + evictable pages.

    growth_share: share of the predicted growth of running requests to keep free; 0 gates on prompts
    alone, 1 on the full prediction. A request alone is always admitted.
    """

    def __init__(self, growth_share: float = 0.25) -> None:
        require(0 <= growth_share <= 1, "growth_share", "in [0, 1]", growth_share)
        self.growth_share = growth_share

    @hookimpl
    def decide_admission(self, query: AdmissionQuery) -> AdmissionDecision:
        """The candidate's need against the supply that nobody else is counting on."""
        if query.pages_reserved_at_once:
            return reserve(query)
        if not len(query.running):
            return AdmissionDecision(Verdict.ADMIT, "nothing else runs")
        supply = query.pages_free + query.pages_evictable - query.pages_promised
        growth_tokens = float(np.sum(query.running.predicted_remaining)) * self.growth_share
        growth = int(np.ceil(growth_tokens / query.page_size))
        need = query.pages_needed + growth
        text = (
            f"needs {query.pages_needed} + {growth} for growth,"
            f" {max(supply, 0)} of {query.pool_pages} pages left"
        )
        return AdmissionDecision(Verdict.ADMIT if need <= supply else Verdict.WAIT, text)
