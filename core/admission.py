"""Who starts: order the waiting, maybe displace for the first, admit until a refusal."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import PolicyError
from core.memory import Look
from core.preemption import ask_victims, preempt
from core.queries import AdmissionDecision, AdmissionQuery, Cause, Verdict
from core.records import StepRecord
from core.request import Sequence
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
        self._order = partial(state.hooks.decide, "decide_order")

    def run(self, record: StepRecord) -> list[Admitted]:
        """Admit from the waiting queue; returns whom, in order."""
        state = self._state
        if not len(state.waiting):
            return []
        facts = self._cached_tokens, state.shown
        state.waiting.refresh(self._order, facts, state.now_s, record.step)
        admitted: list[Admitted] = []
        index = skipped = 0
        while index < len(state.waiting) and skipped < MAX_CANDIDATES:
            candidate = state.table.of(state.waiting.at(index))
            verdict = self._consider(candidate, record, admitted)
            if verdict is Verdict.WAIT:
                if not admitted:
                    self._displace(candidate, record, admitted)
                break
            if verdict is Verdict.SKIP:
                index, skipped = index + 1, skipped + 1
        return admitted

    def take_back(self, admitted: Admitted, record: StepRecord) -> None:
        """The step has no page for an admission after all: it goes back to its place, unharmed."""
        self._state.wait(admitted.sequence)
        reason = "no page for its first tokens"
        record.note(admitted.sequence.key, "unadmitted", CORE, reason)

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
            kind, cached = "resumed" if resumed else "admitted", entry.cached_tokens
            record.note(sequence.key, kind, entry.plugin, entry.reason, cached_tokens=cached)

    def _cached_tokens(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        looks = (self._state.memory.look(self._state.table.of(one)) for one in ids.tolist())
        return np.fromiter((look.cached_tokens for look in looks), np.int32, len(ids))

    def _consider(
        self, sequence: Sequence, record: StepRecord, admitted: list[Admitted]
    ) -> Verdict:
        state = self._state
        if len(state.running) >= state.config.max_num_seqs:
            reason = f"all {state.config.max_num_seqs} slots (engine.max_num_seqs) are taken"
            record.note(sequence.key, "refused", CORE, reason)
            return Verdict.WAIT
        if state.table.in_flight[sequence.slot]:
            record.note(sequence.key, "refused", CORE, "its latest token is still in flight")
            return Verdict.WAIT
        look = state.memory.look(sequence)
        decision, plugin = AdmissionDecision(Verdict.SKIP, "a plugin failed over it"), CORE
        with state.contained(sequence.request.request_id):
            decision, plugin = self._ask(sequence, look, record.step)
        if decision.verdict is Verdict.ADMIT:
            if state.memory.start(sequence, look):
                state.run(sequence)
                admitted.append(Admitted(sequence, look.cached_tokens, plugin, decision.reason))
                return Verdict.ADMIT
            free = state.memory.ledger.num_free
            reason = f"no run of {look.pages_reserved} free pages among {free}"
            plugin, decision = CORE, AdmissionDecision(Verdict.WAIT, reason)
        kind = "refused" if decision.verdict is Verdict.WAIT else "skipped"
        record.note(sequence.key, kind, plugin, decision.reason)
        if look.pages_reserved:
            unusable = state.memory.allocator.unusable_pages(look.pages_reserved)
            record.external_tokens = unusable * state.memory.page_size
        return decision.verdict

    def _ask(self, sequence: Sequence, look: Look, step: int) -> tuple[AdmissionDecision, str]:
        state, memory = self._state, self._state.memory
        running = state.table.view(state.running)
        promised = -(-(running.known + running.in_flight) // memory.page_size) - running.pages_held
        candidate = state.table.view(np.array([sequence.slot]))
        needs = look.cached_tokens, look.pages_needed, look.pages_at_most
        supply = memory.ledger.num_free, look.pages_evictable
        promises = int(np.add.reduce(np.maximum(promised, 0))), look.pages_reserved
        pool: Any = memory.ledger.num_pages, memory.page_size, memory.allocatable, state.shown
        facts: Any = running, len(state.waiting), state.now_s, step, state.step_time
        query = AdmissionQuery(candidate, *needs, *supply, *promises, *pool, *facts)
        decision, plugin = state.hooks.decide("decide_admission", query)
        if not isinstance(decision.verdict, Verdict):
            raise PolicyError(
                f"decide_admission of {plugin}: verdict must be a Verdict, got {decision.verdict!r}"
            )
        return decision, plugin

    def _displace(self, head: Sequence, record: StepRecord, admitted: list[Admitted]) -> None:
        """Let a displacing policy preempt for the first waiting request, victim by victim until
        admission lets it start; nobody else starts in such a step."""
        state = self._state
        if not (state.hooks.displaces and len(state.running)) or state.table.in_flight[head.slot]:
            return
        cause, short = self._lack(head)
        victims, reason = ask_victims(state, record, cause, short, head)
        for victim in victims:
            preempt(state, record, victim, cause, reason, beneficiary=head.request.request_id)
            if self._consider(head, record, admitted) is not Verdict.WAIT:
                return

    def _lack(self, head: Sequence) -> tuple[Cause, int]:
        state = self._state
        if len(state.running) >= state.config.max_num_seqs:
            return Cause.SLOTS, 0
        look = state.memory.look(head)
        supply = state.memory.ledger.num_free + look.pages_evictable
        return Cause.DISPLACE, max(max(look.pages_needed, look.pages_reserved) - supply, 0)
