"""Who starts: order the waiting, let a policy displace for the first of them, admit until a
refusal."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.errors import PolicyError
from core.memory import Look
from core.queries import (
    AdmissionDecision,
    AdmissionQuery,
    Cause,
    PreemptionDecision,
    PreemptionQuery,
    Verdict,
)
from core.records import StepRecord
from core.request import SLOT_MASK, Sequence
from core.state import CORE, EngineState

MAX_CANDIDATES = 256  # a policy may SKIP this many a step: bounds the step's time under long queues


@dataclass(slots=True)
class Admitted:
    """An admission that the step may still take back."""

    sequence: Sequence
    cached_tokens: int
    plugin: str
    reason: str


class Admission:
    """The admission part of a step."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def run(self, record: StepRecord) -> list[Admitted]:
        """Admit from the waiting queue; returns whom, in order."""
        state = self._state
        if not len(state.waiting):
            return []
        self._refresh(record)
        beneficiary = self._displace(record)
        admitted: list[Admitted] = []
        if beneficiary is not None:
            # After a preemption nothing waiting starts in this step but the one it was done for.
            self._consider(beneficiary, record, admitted)
            return admitted
        index = skipped = 0
        while index < len(state.waiting) and skipped < MAX_CANDIDATES:
            verdict = self._consider(self._sequence(state.waiting.at(index)), record, admitted)
            if verdict is Verdict.WAIT:
                break
            if verdict is Verdict.SKIP:
                index, skipped = index + 1, skipped + 1
        return admitted

    def take_back(self, admitted: Admitted, record: StepRecord) -> None:
        """The step has no page for an admission after all: it goes back to its place, unharmed."""
        self._state.wait(admitted.sequence)
        self._state.note(
            record, admitted.sequence, "unadmitted", CORE, "no page for its first tokens"
        )

    def confirm(self, admitted: list[Admitted], record: StepRecord) -> None:
        """Write the admissions that stand into the records."""
        state = self._state
        for entry in admitted:
            sequence = entry.sequence
            if state.table.get(sequence.id) is None:
                continue  # a resumed one that has outgrown the pool ended in the same step
            request_record = state.live[sequence.request.request_id].record
            resumed = bool(state.table.preemptions[sequence.slot])
            if resumed:
                request_record.resumed_cached_tokens += entry.cached_tokens
            elif sequence.choice == 0:
                request_record.cached_tokens = entry.cached_tokens
            if request_record.admitted_s is None:
                request_record.admitted_s = state.now_s
            kind = "resumed" if resumed else "admitted"
            state.note(
                record,
                sequence,
                kind,
                entry.plugin,
                entry.reason,
                cached_tokens=entry.cached_tokens,
            )

    def _sequence(self, id: int) -> Sequence:
        return self._state.table.at(id & SLOT_MASK)

    def _refresh(self, record: StepRecord) -> None:
        state = self._state
        state.waiting.refresh(
            state.hooks.decide_order,
            lambda: state.who("decide_order"),
            self._cached_tokens,
            state.now_s,
            record.step,
        )

    def _cached_tokens(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        looks = (self._state.memory.look(self._sequence(one)) for one in ids.tolist())
        return np.fromiter((look.cached_tokens for look in looks), np.int32, len(ids))

    def _consider(
        self, sequence: Sequence, record: StepRecord, admitted: list[Admitted]
    ) -> Verdict:
        state = self._state
        if len(state.running) >= state.config.max_num_seqs:
            reason = f"all {state.config.max_num_seqs} slots (engine.max_num_seqs) are taken"
            state.note(record, sequence, "refused", CORE, reason)
            return Verdict.WAIT
        look = state.memory.look(sequence)
        decision = self._ask(sequence, look, record.step)
        plugin = state.who("decide_admission")
        if decision.verdict is Verdict.ADMIT:
            if state.memory.start(sequence, look):
                state.run(sequence)
                admitted.append(Admitted(sequence, look.cached_tokens, plugin, decision.reason))
                return Verdict.ADMIT
            plugin, decision = CORE, AdmissionDecision(Verdict.WAIT, self._no_run(look))
        kind = "refused" if decision.verdict is Verdict.WAIT else "skipped"
        state.note(record, sequence, kind, plugin, decision.reason)
        if reserved := state.memory.allocator.reserved_at_admission(
            look.pages_needed, look.pages_at_most
        ):
            unusable = state.memory.allocator.unusable_pages(reserved)
            record.external_tokens = unusable * state.memory.page_size
        return decision.verdict

    def _ask(self, sequence: Sequence, look: Look, step: int) -> AdmissionDecision:
        state, memory = self._state, self._state.memory
        running = state.table.view(state.running)
        promised = -(-(running.known + running.in_flight) // memory.page_size) - running.pages_held
        query = AdmissionQuery(
            candidate=state.table.view(np.array([sequence.slot])),
            cached_tokens=look.cached_tokens,
            pages_needed=look.pages_needed,
            pages_at_most=look.pages_at_most,
            pages_free=memory.ledger.num_free,
            pages_evictable=look.pages_evictable,
            pages_promised=int(np.maximum(promised, 0).sum()),
            pages_reserved_at_once=memory.allocator.reserved_at_admission(
                look.pages_needed, look.pages_at_most
            ),
            pool_pages=memory.ledger.num_pages,
            page_size=memory.page_size,
            allocatable=memory.allocatable,
            running=running,
            waiting=len(state.waiting),
            now_s=state.now_s,
            step=step,
        )
        decision: AdmissionDecision | None = state.hooks.decide_admission(query)
        if decision is None:
            raise PolicyError("no plugin answers decide_admission")
        if not isinstance(decision.verdict, Verdict):
            raise PolicyError(
                f"decide_admission of {state.who('decide_admission')}: verdict must be a Verdict,"
                f" got {decision.verdict!r}"
            )
        return decision

    def _no_run(self, look: Look) -> str:
        need = self._state.memory.allocator.reserved_at_admission(
            look.pages_needed, look.pages_at_most
        )
        return f"no run of {need} free pages among {self._state.memory.ledger.num_free}"

    def _displace(self, record: StepRecord) -> Sequence | None:
        """Let a displacing policy preempt for the first waiting request, if that one cannot start;
        returns it if anyone was preempted."""
        state = self._state
        if not state.hooks.displaces or not len(state.running):
            return None
        head = self._sequence(state.waiting.at(0))
        cause, short = self._blocked(head)
        if cause is None:
            return None
        query = PreemptionQuery(
            cause=cause,
            candidates=state.table.view(state.running),
            pages_short=short,
            beneficiary=state.table.view(np.array([head.slot])),
            random=np.random.default_rng([state.seed & 0xFFFFFFFF, record.step]),
            now_s=state.now_s,
            step=record.step,
        )
        decision: PreemptionDecision | None = state.hooks.decide_preemption(query)
        if decision is None or not len(decision.victims):
            return None
        for victim in check_victims(state, decision, query):
            if self._blocked(head)[0] is None:
                break
            preempt(
                state,
                self._sequence(victim),
                cause,
                decision.reason,
                record,
                head.request.request_id,
            )
        return head

    def _blocked(self, head: Sequence) -> tuple[Cause | None, int]:
        state = self._state
        if len(state.running) >= state.config.max_num_seqs:
            return Cause.SLOTS, 0
        look = state.memory.look(head)
        short = look.pages_needed - state.memory.ledger.num_free - look.pages_evictable
        return (Cause.DISPLACE, short) if short > 0 else (None, 0)


def check_victims(
    state: EngineState, decision: PreemptionDecision, query: PreemptionQuery
) -> list[int]:
    """The decision's victims as ids. Raises PolicyError unless they are distinct candidates."""
    victims = np.asarray(decision.victims)
    allowed = np.isin(victims, query.candidates.id)
    plugin = state.who("decide_preemption")
    if victims.ndim != 1 or not allowed.all():
        raise PolicyError(
            f"decide_preemption of {plugin}: victims must be ids of candidates, got {victims[~allowed][:4]}"
        )
    ids: list[int] = victims.tolist()
    if len(set(ids)) != len(ids):
        raise PolicyError(f"decide_preemption of {plugin}: victims must be distinct, got {ids}")
    return ids


def preempt(
    state: EngineState,
    sequence: Sequence,
    cause: Cause,
    reason: str,
    record: StepRecord,
    beneficiary: str | None = None,
) -> None:
    """Preempt one sequence and write down who decided so, why, and what it cost."""
    freed, lost = state.preempt(sequence)
    detail = {"cause": cause.value, "pages_freed": freed, "lost_tokens": lost}
    if beneficiary is not None:
        detail["beneficiary"] = beneficiary
    state.note(record, sequence, "preempted", state.who("decide_preemption"), reason, **detail)
