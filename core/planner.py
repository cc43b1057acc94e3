"""The plan of a step: who runs and how many tokens, with pages reserved for every row."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.admission import Admission, Admitted
from core.errors import PolicyError
from core.preemption import ask_victims, preempt
from core.protocols import Executor
from core.queries import BatchDecision, BatchQuery, Cause
from core.recent import MOST
from core.records import StepRecord
from core.request import SLOT_MASK, FinishReason
from core.state import CORE, EngineState
from core.table import EndTokens


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A step's rows: table slots int64 [n] and tokens to compute int32 [n], so many times."""

    slots: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    repeats: int = 1

    def keep(self, mask: NDArray[np.bool_]) -> "Rows":
        """The rows where `mask` holds."""
        return Rows(self.slots[mask], self.num_tokens[mask])


class Planner:
    """Turns decisions into rows whose pages are there; the only place that preempts for pages."""

    def __init__(self, state: EngineState, executor: Executor) -> None:
        self._state = state
        self._admission = Admission(state)
        self._forecast = getattr(executor, "forecast", None) if state.hooks.steady else None

    def plan(self, record: StepRecord, until_s: float) -> Rows | None:
        """Admit, choose rows, reserve their pages. None: nothing can run in this step. until_s:
        steps that start earlier may be joined to this one."""
        admitted = self._admission.run(record)
        rows = self._fit(admitted, record)
        self._admission.confirm(admitted, record)
        if rows is not None:
            rows = self._repeated(rows, until_s)
            grown = self._state.memory.grow(rows.slots, rows.num_tokens, rows.repeats)
            record.later_pages, record.later_free = grown
        return rows

    def _fit(self, admitted: list[Admitted], record: StepRecord) -> Rows | None:
        """Rows that memory can serve. What gives way, in this order: this step's admissions,
        victims of the policy, and (after one new plan) rows or tokens at the end of the batch."""
        state, replanning = self._state, False
        while len(state.running):
            rows = self._batch(record, replanning)
            rows = self._take_back(rows, admitted, record)
            if self._short(rows) <= 0:
                return rows
            if replanning and len((trimmed := self._trim(rows)).slots):
                return trimmed
            self._preempt(rows, record)
            replanning = True
        return None

    def _batch(self, record: StepRecord, replanning: bool) -> Rows:
        state = self._state
        running = state.table.view(state.running)
        limit = state.config.max_num_batched_tokens
        facts = len(state.waiting), limit, state.now_s, record.step, replanning, state.step_time
        query = BatchQuery(running, *facts)
        decision, plugin = state.hooks.decide("decide_batch", query)
        record.batch_plugin, record.batch_reason = plugin, decision.reason
        return self._checked(decision, query, plugin)

    def _checked(self, decision: BatchDecision, query: BatchQuery, plugin: str) -> Rows:
        ids = np.asarray(decision.ids, np.int64)
        num_tokens = np.asarray(decision.num_tokens, np.int32)
        table = self._state.table
        slots = ids & SLOT_MASK
        where = f"decide_batch of {plugin}"
        if ids.ndim != 1 or ids.shape != num_tokens.shape or len(ids) == 0:
            shapes = f"{ids.shape}, {num_tokens.shape}"
            raise PolicyError(f"{where}: ids, num_tokens must be of one length >= 1, got {shapes}")
        unnamed = np.zeros(len(table.sequences), np.bool_)
        unnamed[self._state.running] = True
        if slots.max() >= len(unnamed) or not (unnamed[slots] & (table.id[slots] == ids)).all():
            raise PolicyError(f"{where}: ids must be running requests, got {ids.tolist()[:4]}")
        unnamed[slots] = False
        if np.count_nonzero(unnamed) != len(query.running) - len(ids):
            raise PolicyError(f"{where}: ids must be distinct, got {ids.tolist()[:8]}")
        left = table.known[slots] + table.in_flight[slots] - table.computed[slots]
        wrong = (num_tokens < 1) | (num_tokens > left)
        if wrong.any():
            index = int(wrong.argmax())
            raise PolicyError(
                f"{where}: num_tokens must be in [1, remaining = {left[index]}],"
                f" got {num_tokens[index]}"
            )
        if (total := int(num_tokens.sum())) > query.token_limit:
            raise PolicyError(
                f"{where}: num_tokens must sum to <= engine.max_num_batched_tokens ="
                f" {query.token_limit}, got {total}"
            )
        return Rows(slots, num_tokens)

    def _repeated(self, rows: Rows, until_s: float) -> Rows:
        """The rows as often as they would be chosen anew before `until_s`, with nothing else to
        decide: all decode, nobody ends earlier, none who waits could start, and there are pages."""
        state, slots = self._state, rows.slots
        if self._forecast is None or until_s <= state.now_s or not self._only_decodes(rows):
            return rows
        table, memory = state.table, state.memory
        longest = np.minimum(table.output_limit[slots], state.max_model_len - table.prompt[slots])
        known = table.known[slots] + table.in_flight[slots]
        num = np.int32(min(MOST, int((longest - known + table.prompt[slots]).min())))
        while num > 1 and memory.pages_short(slots, rows.num_tokens * num).sum() > memory.supply:
            num //= np.int32(2)
        planned_s, _ = self._forecast(table.row[slots], int(known.sum()), int(num))
        # With overlap the last of them is planned, and launched, while the others are in flight.
        repeats = int((planned_s < until_s).sum()) - state.config.overlap
        return Rows(slots, rows.num_tokens, max(repeats, 1))

    def _only_decodes(self, rows: Rows) -> bool:
        state, table, slots = self._state, self._state.table, rows.slots
        waits, everyone = len(state.waiting) > 0, len(slots) == len(state.running)
        full = len(state.running) >= state.config.max_num_seqs and not state.hooks.displaces
        # Whose last token is in flight may bring a request that waits for its end.
        draining = len(state.table) > len(state.running) + len(state.waiting)
        if not everyone or draining or (waits and not (full and state.waiting.holds)):
            return False
        computed, in_flight = table.computed[slots], table.in_flight[slots]
        decodes = (table.known[slots] + in_flight - computed == 1) & (in_flight <= 1)
        decodes &= computed >= table.prompt[slots]
        endless = table.end_tokens[slots] == EndTokens.NONE
        return bool((decodes & endless & (table.forks[slots] == 0)).all())

    def _short(self, rows: Rows) -> int:
        memory = self._state.memory
        return int(memory.pages_short(rows.slots, rows.num_tokens).sum()) - memory.supply

    def _take_back(self, rows: Rows, admitted: list[Admitted], record: StepRecord) -> Rows:
        """Undo admissions, the last first, while the batch does not fit and someone else runs."""
        while admitted and len(self._state.running) > 1 and self._short(rows) > 0:
            entry = admitted.pop()
            self._admission.take_back(entry, record)
            rows = rows.keep(rows.slots != entry.sequence.slot)
            if len(rows.slots) == 0:
                rows = self._batch(record, replanning=True)
        return rows

    def _trim(self, rows: Rows) -> Rows:
        """The leading rows that fit, the first that does not cut to what is left."""
        memory, table = self._state.memory, self._state.table
        left = memory.supply
        num_tokens = rows.num_tokens.copy()
        short = memory.pages_short(rows.slots, num_tokens)
        for index in np.flatnonzero(short):
            slot = rows.slots[index]
            granted = min(int(short[index]), left)
            room = (int(table.pages_held[slot]) + granted) * memory.page_size - int(
                table.computed[slot]
            )
            num_tokens[index] = min(int(num_tokens[index]), room)
            left -= granted
        return Rows(rows.slots, num_tokens).keep(num_tokens > 0)

    def _preempt(self, rows: Rows, record: StepRecord) -> None:
        """Preempt until the rows that remain fit; end the last running one if it cannot grow."""
        state = self._state
        if len(state.running) == 1:
            self._end_last(record)
            return
        wanted = self._short(rows)
        victims, reason = ask_victims(state, record, Cause.PAGES, wanted)
        for victim in victims:
            if self._short(rows) <= 0 or len(state.running) == 1:
                return
            slot = victim.slot
            preempt(state, record, victim, Cause.PAGES, reason)
            rows = rows.keep(rows.slots != slot)
        if self._short(rows) > 0 and len(state.running) > 1:
            raise PolicyError(
                f"decide_preemption of {state.hooks.who['decide_preemption']}: victims must free"
                f" the {wanted} pages that are short, got {len(victims)} victims and"
                f" {self._short(rows)} pages still short"
            )

    def _end_last(self, record: StepRecord) -> None:
        state = self._state
        sequence = state.table.at(int(state.running[0]))
        held, pool = int(state.table.pages_held[sequence.slot]), state.memory.ledger.num_pages
        size = state.memory.page_size
        message = (
            f"request {sequence.request.request_id!r} holds {held} of the pool's {pool} pages"
            f" ({pool * size} tokens), needs one more, and nothing else runs"
        )
        state.note(record, sequence, "finished", CORE, message)
        sequence.ending, sequence.error = FinishReason.capacity, message
        if state.table.in_flight[sequence.slot]:
            state.drain(sequence)
        else:
            state.finish(sequence, FinishReason.capacity, message)
