"""Memory-constrained shortest first: admit if memory will hold at every time somebody ends.

MC-SF (Jaillet et al., "Online Scheduling for LLM Inference with KV Cache Constraints", arXiv
2502.07115): who runs goes on; the waiting are looked at by predicted output, shortest first, until
one does not fit. Use it with the order `sjf`, which puts them so; with true lengths
(predictor `oracle`) nobody is ever preempted for pages as long as each running request
gets its token in every step.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, AdmissionQuery, Verdict
from plugins.admission.at_once import reserve
from plugins.admission.future import copies, own_tokens, peak_pages, supply


class McSf:
    """Admit while the fullest moment to come, by predicted lengths, is within the pool. A request
    alone is always admitted."""

    @hookimpl
    def decide_admission(self, query: AdmissionQuery) -> AdmissionDecision:
        """The peak of the running and the candidate against what they may use."""
        if query.pages_reserved_at_once:
            return reserve(query)
        if not len(query.running):
            return AdmissionDecision(Verdict.ADMIT, "nothing else runs")
        predicted = [query.running.predicted_remaining, query.candidate.predicted_remaining]
        left = np.maximum(np.ceil(np.concatenate(predicted)), 1).astype(np.int64)
        peak = peak_pages(own_tokens(query), left, copies(query), query.page_size)
        have = supply(query)
        text = f"peak of {peak} pages as predicted, {have} to use"
        return AdmissionDecision(Verdict.ADMIT if peak <= have else Verdict.WAIT, text)
