"""What one engine knows, and the few moves that change a sequence's state.

Planning, settling and committing (planner.py, commit.py) are written in terms of these moves."""

import logging
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.clock import Clock
from core.config import EngineConfig
from core.errors import PolicyError, RequestError, described
from core.hooks import Hooks
from core.memory import KVMemory
from core.protocols import LengthPredictor
from core.queries import CacheAdmissionQuery
from core.records import ChoiceRecord, RequestRecord
from core.request import FinishReason, Request, Sequence
from core.table import SequenceTable, State
from core.waiting import WaitingQueue

CORE = "core"  # the plugin name of decisions the core makes itself
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Live:
    """A request that has not ended: as plugins see it, its record, its live sequences."""

    request: Request
    record: RequestRecord
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class EngineState:
    """Everything mutable of one engine. `running`: slots in admission order, int64."""

    config: EngineConfig
    seed: int
    hooks: Hooks
    clock: Clock
    table: SequenceTable
    waiting: WaitingQueue
    memory: KVMemory
    predictor: LengthPredictor
    step_time: Any  # a plugins.shared.step_time.StepTimeModel
    vocab_size: int
    max_model_len: int
    model_end_tokens: tuple[int, ...]
    contains_faults: bool
    running: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    live: dict[str, Live] = field(default_factory=dict)
    ended: list[Live] = field(default_factory=list)  # since the last StepEvent
    faults: dict[str, str] = field(default_factory=dict)  # requests to fail at the next step, why
    finish_counts: Counter[str] = field(default_factory=Counter)
    admissions: int = 0
    now_s: float = 0.0  # start of the step, or when its launch was collected

    def arrive(self, request: Request) -> Live:
        """Enter a request: waiting, or ended at once if it can never be served."""
        facts = request.request_id, request.client, request.arrival_s, len(request.prompt)
        record = RequestRecord(*facts)
        record.choices = [ChoiceRecord() for _ in range(request.params.n)]
        shown = request if request.forced_output is None else replace(request, forced_output=None)
        live = self.live[request.request_id] = Live(shown, record)
        if error := self._never_fits(request):
            self.end(live, FinishReason.capacity, error)
        elif request.output_limit == 0 and request.params.prompt_logprobs is None:
            self.end(live, FinishReason.length)
        else:
            predicted = float(request.params.max_tokens)
            with self.contained(request.request_id):
                predicted = self.predictor.predict(request if self.hooks.oracle else shown)
            record.predicted_output = predicted
            for choice in request.resumed or (0,):
                sequence = self.table.add(request, choice, record.choices[choice], predicted)
                live.sequences.append(sequence)
                self.waiting.push(sequence.id)
            self.table.forks[sequence.slot] = 0 if request.resumed else request.params.n - 1
        return live

    def shown(self, id: int) -> Request:
        """What the client of a live sequence asked, as plugins may see it."""
        return self.live[self.table.of(id).request.request_id].request

    @contextmanager
    def contained(self, request_id: str) -> Iterator[None]:
        """Around a hook that concerns one request. Where faults are contained, what it raises is
        logged and fails that request at the next step; elsewhere it goes on to the caller."""
        try:
            yield
        except Exception as error:
            if not self.contains_faults:
                raise
            text = f"request {request_id!r} failed: {described(error)}"
            logger.error("%s", text, exc_info=error)
            if request_id in self.live:
                self.faults[request_id] = text

    def validate(self, request: Request, queued: Container[str] = ()) -> None:
        """Raise RequestError for one that is malformed here. queued: ids yet to arrive."""
        if request.request_id in self.live or request.request_id in queued:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request"
            )
        named = [("prompt", request.prompt), ("stop_token_ids", request.params.stop_token_ids)]
        named.append(("logit_bias", list(request.params.logit_bias)))
        named += [("resumed", made) for made in request.resumed.values()]
        for field_name, tokens in named:
            ids = np.asarray(tokens)
            if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
                wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
                raise RequestError(
                    f"{field_name} of request {request.request_id!r} must hold token ids in"
                    f" [0, {self.vocab_size}), got {wrong}"
                )

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """End one choice; the request ends with its last."""
        live = self.live[sequence.request.request_id]
        if reason is FinishReason.stop:
            self.memory.publish(sequence)
        self._remove(live, sequence)
        live.record.choices[sequence.choice].finish_reason = reason.value
        if not live.sequences:
            self.end(live, reason, error)

    def end(self, live: Live, reason: FinishReason, error: str = "") -> None:
        """End a request with all its choices, exactly once."""
        for sequence in list(live.sequences):
            self._remove(live, sequence)
        for choice in live.record.choices:
            choice.finish_reason = choice.finish_reason or reason.value
        live.record.finish_reason = reason.value
        live.record.error = error
        live.record.finished_s = self.now_s
        del self.live[live.request.request_id]
        self.faults.pop(live.request.request_id, None)  # not those of the next one with its id
        self.finish_counts[reason.value] += 1
        with self.contained(live.request.request_id):
            self.predictor.observe(live.record)
        self.ended.append(live)

    def drain(self, sequence: Sequence) -> int:
        """Its last token is launched: give its memory back now; the choice ends when the token
        arrives. Returns tokens computed in vain (see KVMemory.publish)."""
        wasted = self.memory.publish(sequence)
        self._take_out(sequence)
        self.table.state[sequence.slot] = State.DRAINING
        return wasted

    def run(self, sequence: Sequence) -> None:
        """waiting -> running, at the end of the admission order."""
        slot = sequence.slot
        self.waiting.discard(sequence.id)
        self.admissions += 1
        self.table.state[slot] = State.RUNNING
        self.table.admitted_order[slot] = self.admissions
        self.running = np.concatenate((self.running, [slot]))

    def wait(self, sequence: Sequence) -> int:
        """running -> waiting with nothing held; returns pages that came free at once."""
        slot = sequence.slot
        self.running = self.running[self.running != slot]
        freed = self.memory.release(sequence)
        self.table.computed[slot] = 0
        self.table.state[slot] = State.WAITING
        self.waiting.push(sequence.id)
        return freed

    def preempt(self, sequence: Sequence) -> tuple[int, int]:
        """Take a running sequence's pages; returns (pages freed at once, computed tokens lost). Its
        whole pages go to the cache, where they may be evicted or found again."""
        slot = sequence.slot
        lost = int(self.table.computed[slot])
        self.table.computed_max[slot] = max(int(self.table.computed_max[slot]), lost)
        self.table.preemptions[slot] += 1
        self.live[sequence.request.request_id].record.preemptions += 1
        self.memory.publish(sequence)
        return self.wait(sequence), lost

    def may_cache(self, sequence: Sequence) -> bool:
        """Ask once whether the sequence's pages may enter the prefix cache."""
        if sequence.cacheable is None:
            sequence.cacheable = 0
            if self.memory.uses_cache(sequence):
                with self.contained(sequence.request.request_id):
                    sequence.cacheable = self._ask_to_cache(sequence)
        return sequence.cacheable > 0

    def _remove(self, live: Live, sequence: Sequence) -> None:
        tokens = self.table.tokens(sequence)  # its record has their times then
        sequence.record.token_ids = tokens[len(tokens) - len(sequence.record.times_s) :]
        live.record.computed_tokens += int(self.table.computed_total[sequence.slot])
        live.record.recomputed_tokens += int(self.table.recomputed_total[sequence.slot])
        self._take_out(sequence)
        live.sequences.remove(sequence)
        self.table.remove(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        slot = sequence.slot
        if self.table.state[slot] == State.RUNNING:
            self.running = self.running[self.running != slot]
        self.waiting.discard(sequence.id)
        self.memory.release(sequence)

    def _never_fits(self, request: Request) -> str:
        length = len(request.prompt) + max(map(len, request.resumed.values()), default=0)
        if length + min(request.params.max_tokens, 1) > self.max_model_len:
            return (
                f"prompt of request {request.request_id!r} must leave room for one token within"
                f" max_model_len = {self.max_model_len} tokens, got {length}"
            )
        need, have = self.memory.pages_for(length), self.memory.ledger.num_pages
        longest = len(request.prompt) + max(request.params.max_tokens, 1) - 1
        at_most = self.memory.pages_for(min(longest, self.max_model_len))
        need = max(need, self.memory.allocator.reserved_at_admission(need, at_most))
        if need > have:
            size = self.memory.page_size
            return (
                f"request {request.request_id!r} needs {need} pages ({need * size} tokens) at once,"
                f" the pool holds {have} pages ({have * size} tokens)"
            )
        return ""

    def _ask_to_cache(self, sequence: Sequence) -> int:
        live = self.live[sequence.request.request_id]
        known = int(self.table.known[sequence.slot])
        query = CacheAdmissionQuery(live.request, known, live.record.cached_tokens, self.now_s)
        decision, plugin = self.hooks.decide("decide_cache_admission", query)
        most = self.max_model_len if decision.num_tokens is None else decision.num_tokens
        if most < 0:
            where = f"decide_cache_admission of {plugin}"
            raise PolicyError(f"{where}: num_tokens must be >= 0 or None, got {most}")
        return most // self.memory.page_size if decision.admit else 0
