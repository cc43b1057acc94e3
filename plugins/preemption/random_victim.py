"""Random victims: the baseline any rule must beat. Drawn from the run's seed and the step."""

from core.hookspecs import hookimpl
from core.queries import Cause, PreemptionDecision, PreemptionQuery


class RandomVictim:
    """Victims in random order. Displaces nobody."""

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        """Rank all candidates; None unless pages are short."""
        if query.cause is not Cause.PAGES:
            return None
        order = query.random.permutation(len(query.candidates))
        return PreemptionDecision(query.candidates.id[order], "drawn at random")
