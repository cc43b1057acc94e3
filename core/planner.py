"""The plan of a step: who runs and how many tokens, with pages reserved for every row."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.admission import Admission, Admitted
from core.errors import PolicyError
from core.launch import Repeats
from core.preemption import ask_victims, preempt
from core.protocols import Executor
from core.queries import BatchDecision, BatchQuery, Cause
from core.records import StepRecord
from core.request import SLOT_MASK, FinishReason
from core.state import CORE, EngineState
from core.table import State, some


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A step's rows: table slots int64 [n], tokens to compute int32 [n]; the rest as in Launch."""

    slots: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    repeats: Repeats | None = None
    num_new: int = 0

    @property
    def total(self) -> NDArray[np.int32]:
        """Tokens of each, however often it runs."""
        return self.num_tokens if self.repeats is None else self.repeats.each[-1]

    def keep(self, which: NDArray[Any]) -> "Rows":
        """The rows of a mask, or in the order of indices; not of rows that repeat."""
        return Rows(self.slots[which], self.num_tokens[which])


class Planner:
    """Turns decisions into rows whose pages are there; the only place that preempts for pages."""

    def __init__(self, state: EngineState, executor: Executor) -> None:
        self._state = state
        self._admission = Admission(state)
        joins = state.hooks.steady and not (state.config.overlap and state.hooks.listens)
        self._forecast = getattr(executor, "forecast", None) if joins else None
        self._holds = False  # of the last decision

    def plan(self, record: StepRecord, until_s: float) -> Rows | None:
        """Admit, choose rows, reserve their pages; one-token rows first. None: nothing can run in
        this step. until_s: steps that start earlier may be joined to this one."""
        admitted = self._admission.run(record)
        rows = self._fit(admitted, record)
        self._admission.confirm(admitted, record)
        if rows is not None:
            if some(slices := rows.num_tokens > 1):
                rows = rows.keep(np.argsort(slices, kind="stable"))
            repeats = self._repeats(rows, len(admitted), until_s)
            rows = Rows(rows.slots, rows.num_tokens, repeats, len(admitted))
            later = self._state.memory.grow(rows.slots, rows.total, repeats)
            record.later_pages, record.later_free = later
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
        facts = len(state.waiting), state.config.max_num_batched_tokens, state.now_s, record.step
        query = BatchQuery(running, *facts, replanning, state.step_time)
        decision, plugin = state.hooks.decide("decide_batch", query)
        record.batch_plugin, record.batch_reason = plugin, decision.reason
        return self._checked(decision, query, plugin)

    def _checked(self, decision: BatchDecision, query: BatchQuery, plugin: str) -> Rows:
        ids = np.asarray(decision.ids, np.int64)
        num_tokens = np.asarray(decision.num_tokens, np.int32)
        where = f"decide_batch of {plugin}"
        if ids.ndim != 1 or ids.shape != num_tokens.shape or len(ids) == 0:
            shapes = f"{ids.shape}, {num_tokens.shape}"
            raise PolicyError(f"{where}: ids, num_tokens must be of one length >= 1, got {shapes}")
        running, slots = query.running, self._state.running
        if ids is not running.id and ids.tobytes() != running.id.tobytes():  # other than all
            slots = self._distinct(ids, where)
            running = self._state.table.view(slots)
        left = running.remaining
        if num_tokens is not left and some(wrong := (num_tokens < 1) | (num_tokens > left)):
            index = int(wrong.argmax())
            raise PolicyError(
                f"{where}: num_tokens must be in [1, remaining = {left[index]}],"
                f" got {num_tokens[index]}"
            )
        if (total := int(np.add.reduce(num_tokens))) > query.token_limit:
            raise PolicyError(
                f"{where}: num_tokens must sum to <= engine.max_num_batched_tokens ="
                f" {query.token_limit}, got {total}"
            )
        self._holds = decision.holds
        return Rows(slots, num_tokens)

    def _distinct(self, ids: NDArray[np.int64], where: str) -> NDArray[np.int64]:
        """The slots of `ids`. Raises PolicyError unless these are running requests, once each."""
        table, slots = self._state.table, ids & SLOT_MASK
        known, state = table.id.take(slots, mode="clip"), table.state.take(slots, mode="clip")
        if np.count_nonzero((known == ids) & (state == State.RUNNING)) < len(ids):
            raise PolicyError(f"{where}: ids must be running requests, got {ids.tolist()[:4]}")
        if len(set(ids.tolist())) < len(ids):
            raise PolicyError(f"{where}: ids must be distinct, got {ids.tolist()[:8]}")
        return slots

    def _repeats(self, rows: Rows, num_new: int, until_s: float) -> Repeats | None:
        """How often the rows would be chosen anew before `until_s`, with nothing else to decide:
        these are all who run, each decodes or has slices alike until its prompt ends, nobody ends
        earlier or by a token, none who waits could start, and there are pages. None: once."""
        state, table, slots = self._state, self._state.table, rows.slots
        if self._forecast is None or until_s <= state.now_s or len(slots) < len(state.running):
            return None
        full = len(state.running) >= state.config.max_num_seqs and not state.hooks.displaces
        nobody_starts = not len(state.waiting) or (full and state.waiting.holds)
        if not nobody_starts or any(table.end_tokens[slots].tolist()):
            return None
        known, first = table.known[slots] + table.in_flight[slots], table.computed[slots]
        left, room = known - first, table.length_limit[slots] - known
        slices, prompts = left > 1, known <= table.prompt[slots]
        if some(slices):
            if not self._holds or not state.memory.publishes_apart(slots[slices]):
                return None
            prompts &= ~slices
        if some(prompts):
            return None  # one ends with one token
        facts = table.row[slots], first, rows.num_tokens, left, room
        repeats: Repeats = self._forecast(*facts, until_s, num_new)
        forks = any(table.forks[slots].tolist())  # choices start when their prompt ends
        times = repeats.turn if forks else len(repeats.each)
        while times > 1 and self._short(rows, repeats.each[times - 1]) > 0:
            times //= 2
        return repeats.until(times) if times > 1 else None

    def _short(self, rows: Rows, total: NDArray[np.int32] | None = None) -> int:
        """Pages that `rows` lack beyond the supply, for so many tokens; 0 or less: none."""
        memory, most = self._state.memory, self._state.config.max_num_batched_tokens
        most = most if total is None else sum(total.tolist())
        if len(rows.slots) + most // memory.page_size <= memory.supply:
            return 0  # no need to count
        num_tokens = rows.num_tokens if total is None else total
        return int(memory.pages_short(rows.slots, num_tokens).sum()) - memory.supply

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
        short = memory.pages_short(rows.slots, rows.num_tokens)
        left = memory.supply - (np.cumsum(short) - short)
        held = table.pages_held[rows.slots] + np.clip(left, 0, short)
        room = held * memory.page_size - table.computed[rows.slots]
        num_tokens = np.minimum(rows.num_tokens, room).astype(np.int32)
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
            rows = rows.keep(rows.slots != victim.slot)
            preempt(state, record, victim, Cause.PAGES, reason)
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
        message = (
            f"request {sequence.request.request_id!r} holds {held} of the pool's {pool} pages"
            f" ({pool * state.memory.page_size} tokens), needs one more, and nothing else runs"
        )
        record.note(sequence.key, "finished", CORE, message)
        sequence.ending, sequence.error = FinishReason.capacity, message
        if state.table.in_flight[sequence.slot]:
            state.drain(sequence)
        else:
            state.finish(sequence, FinishReason.capacity, message)
