"""Who gives way: ask the policy for victims, check its answer, take their pages, write it down."""

import numpy as np

from core.errors import PolicyError
from core.queries import Cause, PreemptionDecision, PreemptionQuery
from core.records import StepRecord
from core.request import Sequence
from core.state import EngineState


def ask_victims(
    state: EngineState,
    record: StepRecord,
    cause: Cause,
    pages_short: int,
    beneficiary: Sequence | None = None,
) -> tuple[list[Sequence], str]:
    """Victims, first to go first, and the reason. Raises PolicyError unless they are distinct
    candidates, or if nobody answers when pages are short."""
    waiting = state.table.view(np.array([beneficiary.slot])) if beneficiary else None
    random = np.random.default_rng([state.seed & 0xFFFFFFFF, record.step])
    facts = pages_short, waiting, random, state.now_s, record.step, state.step_time
    query = PreemptionQuery(cause, state.table.view(state.running), *facts)
    ask = state.hooks.ask("decide_preemption", query)
    if ask is None and cause is not Cause.PAGES:
        return [], ""
    if ask is None:
        raise PolicyError("no plugin answers decide_preemption when pages are short")
    return _checked(ask, query, state), ask.reason


def preempt(
    state: EngineState,
    record: StepRecord,
    sequence: Sequence,
    cause: Cause,
    reason: str,
    **detail: str,
) -> None:
    """Preempt one sequence and write down who decided so, why, and what it cost."""
    freed, lost = state.preempt(sequence)
    plugin = state.hooks.who["decide_preemption"]
    figures = {"cause": cause.value, "pages_freed": freed, "lost_tokens": lost}
    record.note(sequence.key, "preempted", plugin, reason, **figures, **detail)


def _checked(
    decision: PreemptionDecision, query: PreemptionQuery, state: EngineState
) -> list[Sequence]:
    victims = np.asarray(decision.victims, np.int64)
    where = f"decide_preemption of {state.hooks.who['decide_preemption']}"
    allowed = np.isin(victims, query.candidates.id)
    if victims.ndim != 1 or not allowed.all():
        raise PolicyError(
            f"{where}: victims must be ids of candidates, got {victims[~allowed].tolist()[:4]}"
        )
    if len(np.unique(victims)) != len(victims):
        raise PolicyError(f"{where}: victims must be distinct, got {victims.tolist()}")
    return [state.table.of(victim) for victim in victims.tolist()]
