"""Reserve the maximum: admit only if every running request could still reach its longest output.

Orca's rule (Yu et al., OSDI 2022). Nothing is ever preempted for pages; memory stands idle instead.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, AdmissionQuery, Verdict


class ReserveMax:
    """Admit while the candidate's and all running requests' largest needs fit the pool together.

    Each choice still to come (n > 1) counts as a whole sequence, though it will share its prompt.
    """

    @hookimpl
    def decide_admission(self, query: AdmissionQuery) -> AdmissionDecision:
        """Worst case of everyone against free + evictable pages."""
        running = query.running
        longest = running.prompt + running.max_output - 1  # the last token's KV is never stored
        pages = -(-longest // query.page_size)
        growth = pages * (1 + running.forks) - running.pages_held
        reserved = int(np.maximum(growth, 0).sum())
        supply = query.pages_free + query.pages_evictable - reserved
        need = max(query.pages_at_most, query.pages_reserved_at_once)
        need *= 1 + int(query.candidate.forks[0])
        fits = need <= supply and query.allocatable(need)
        # A request whose own worst case exceeds the pool may still run alone.
        verdict = Verdict.ADMIT if fits or not len(running) else Verdict.WAIT
        return AdmissionDecision(verdict, f"at most {need} pages, {max(supply, 0)} not reserved")
