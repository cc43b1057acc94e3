"""The engine: drain, plan, launch, collect, commit, record; once a step."""

from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter

import numpy as np

from core.clock import Clock
from core.commit import Committer, Got, InFlight
from core.errors import EngineStoppedError, LaunchError, PolicyError
from core.hooks import Hooks
from core.invariants import check_invariants
from core.launch import LaunchResult
from core.pack import Packer
from core.planner import Planner, Rows
from core.protocols import Executor, Sink
from core.queries import RequestEvent, StepEvent
from core.records import RequestRecord, StepRecord
from core.request import FinishReason, Request
from core.state import EngineState

_NONE = np.empty(0, np.int32)
MAX_IDLE_STEPS = 8  # steps in a row in which an idle engine may refuse everyone who waits


@dataclass(slots=True, eq=False)
class Engine:
    """Continuous batching over one executor. `submit` and `abort` may be called from any thread,
    `step` from one. Build it with core.build.build_engine."""

    state: EngineState
    executor: Executor
    sinks: list[Sink]
    record_rows: bool = True
    records: dict[str, RequestRecord] = field(default_factory=dict)  # every request seen
    steps: int = 0
    _inbox: deque[Request | str] = field(default_factory=deque)
    _queued: set[str] = field(default_factory=set)  # ids of the requests in the inbox
    _lock: Lock = field(default_factory=Lock)  # between submitters: an id is queued once
    _in_flight: deque[InFlight] = field(default_factory=deque)
    _idle_steps: int = 0
    _stopped: str = ""  # why the executor is not called any more
    _unsent: StepRecord | None = None  # of a step that launched nothing and committed another
    _planner: Planner = field(init=False)
    _packer: Packer = field(init=False)
    _committer: Committer = field(init=False)

    def __post_init__(self) -> None:
        self._planner = Planner(self.state, self.executor)
        self._packer = Packer(self.state, self.executor.computes)
        self._committer = Committer(self.state)

    @property
    def clock(self) -> Clock:
        """The clock that arrivals and records are measured on."""
        return self.state.clock

    @property
    def hooks(self) -> Hooks:
        """The plugins in charge."""
        return self.state.hooks

    @property
    def has_work(self) -> bool:
        """Anything queued, waiting, running or in flight."""
        work = self._inbox or self.state.live or self._in_flight
        return bool(work) or self._unsent is not None

    @property
    def stalled(self) -> bool:
        """Requests wait, and nothing runs or is in flight: only a new arrival or time can help."""
        return self._idle_steps > 0

    @property
    def ending(self) -> bool:
        """Somebody's last token is in flight: its end may bring who waits for that."""
        state = self.state
        return len(state.table) > len(state.running) + len(state.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request for the next step. Raises RequestError if it is malformed; one that can
        never fit the pool or the model's length ends at once, with a record that says so. Raises
        EngineStoppedError after an executor's failure for good."""
        with self._lock:
            self._require_executor()
            self.state.validate(request, self._queued)
            self._queued.add(request.request_id)
            self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        """End a request at the next step. Unknown and ended ids are ignored."""
        self._inbox.append(request_id)

    def step(self, until_s: float = 0.0) -> StepEvent | None:
        """One iteration. With overlap the event is the previous launch's. None: nothing to tell.
        until_s: nobody else comes before, whoever ends; in simulated time steps may go in one.

        A launch that cannot be made (LaunchError) fails its requests and no others. What else the
        executor raises ends every request with that reason, tokens in flight are dropped, and the
        exception goes on to the caller; from then on `step` raises EngineStoppedError."""
        self._require_executor()
        if self._unsent is not None:
            record, self._unsent = self._unsent, None
            return self._emit(record)
        state, since = self.state, perf_counter()
        state.now_s = state.clock.now()
        record = StepRecord(self.steps, state.now_s)
        self._drain()
        rows = self._planner.plan(record, until_s)
        since = record.lap("plan", since)
        launched = rows is not None and self._launch(rows, record, since)
        self._check_progress(rows is not None, record)
        event = self._after_launch(launched, record)
        self.steps += record.steps
        if state.config.strict:
            check_invariants(state, [entry.ids for entry in self._in_flight])
        return event

    def close(self) -> None:
        """Release the executor's device."""
        self.executor.close()

    def _launch(self, rows: Rows, record: StepRecord, since: float) -> bool:
        """Whether the launch of `rows` is on its way; else its requests have ended."""
        state = self.state
        launch = self._packer.pack(rows, record)
        ends = launch.first_positions + rows.total
        entry = InFlight(launch, state.table.id[rows.slots], ends, record)
        pairs = np.stack((rows.slots, rows.total), axis=1).tolist() if self.record_rows else []
        listed = [(*state.table.at(slot).key, num) for slot, num in pairs]
        since = record.lap("pack", since)
        try:
            self.executor.launch(launch)
        except LaunchError as error:
            # Not collected, it holds no row: those it shares with launches in flight wait for them.
            last = self._in_flight[-1].launch.launch_id if self._in_flight else -1
            state.memory.rows.launched(last, launch.row_ids)
            for one in entry.ids.tolist():
                self._committer.fail(one, f"ended: {error}", record)
            return False
        except Exception as error:
            self._stop(error, record)
            raise
        self._packer.account(launch, rows, record)
        record.num_rows, record.rows = len(rows.slots), listed
        record.launched_s = state.clock.now()
        record.lap("launch", since)
        self._measure(record)
        self._in_flight.append(entry)
        return True

    def _stop(self, error: Exception, record: StepRecord) -> None:
        """End every request with the reason; nothing in flight is collected."""
        state = self.state
        with self._lock:  # who submits either comes before, and ends here, or is refused
            self._stopped = f"the engine stopped: {type(error).__name__}: {error}"
        error.add_note("the engine stopped: every unfinished request ended with this error")
        state.now_s = state.clock.now()
        self._drain()
        for live in list(state.live.values()):
            state.end(live, FinishReason.error, self._stopped)
        self._in_flight.clear()
        state.memory.rows.collected(self._packer.next_id)
        self._emit(record)

    def _require_executor(self) -> None:
        if self._stopped:
            raise EngineStoppedError(self._stopped)

    def _after_launch(self, launched: bool, record: StepRecord) -> StepEvent | None:
        """Settle the new launch, commit the oldest, in the order that core/commit.py explains."""
        overlap = self.state.config.overlap and launched
        if launched and not overlap:
            self._settle(self._in_flight[-1])
        due = len(self._in_flight) > 1 or (self._in_flight and not overlap)
        event = self._commit(self._in_flight.popleft()) if due else None
        if overlap:
            self._settle(self._in_flight[-1])
        if not launched and (record.choices or self.state.ended):
            self._measure(record)
            if event is not None:
                self._unsent = record
            else:
                event = self._emit(record)
        return event

    def _settle(self, entry: InFlight) -> None:
        since = perf_counter()
        if entry.record.steps > 1:
            result = self._collect(entry)
            since = entry.record.lap("collect", since)
            self._committer.take_first(entry, result)
        self._committer.settle(entry)
        entry.record.lap("commit", since)

    def _commit(self, entry: InFlight) -> StepEvent:
        since, record = perf_counter(), entry.record
        result = self._collect(entry)
        since = record.lap("collect", since)
        self.state.memory.rows.collected(result.launch_id)
        record.graph_tokens, record.attention = result.graph_tokens, result.attention
        committed = self._committer.commit(entry, result)
        since = record.lap("commit", since)
        event = self._emit(record, committed)
        record.lap("observers", since)
        return event

    def _collect(self, entry: InFlight) -> LaunchResult:
        try:
            result = self.executor.collect()
        except Exception as error:
            self._stop(error, entry.record)
            raise
        expected = entry.launch.launch_id
        assert result.launch_id == expected, f"collected {result.launch_id}, not {expected}"
        self.state.now_s = self.state.clock.now()
        return result

    def _drain(self) -> None:
        while self._inbox:
            self._idle_steps = 0
            item = self._inbox.popleft()
            if isinstance(item, str):
                if (live := self.state.live.get(item)) is not None:
                    self.state.end(live, FinishReason.abort)
                continue
            live = self.state.arrive(item)
            self._queued.discard(item.request_id)
            self.records[item.request_id] = live.record
            with self.state.contained(item.request_id):
                self.hooks.notify("on_request_arrived", RequestEvent(live.request, live.record))
        for request_id, error in list(self.state.faults.items()):
            self.state.end(self.state.live[request_id], FinishReason.error, error)

    def _check_progress(self, launched: bool, record: StepRecord) -> None:
        """A policy that keeps everyone out of an idle engine would hang it: say so instead."""
        stuck = not launched and not self._in_flight and len(self.state.waiting)
        self._idle_steps = self._idle_steps + 1 if stuck else 0
        if self._idle_steps >= MAX_IDLE_STEPS:
            refusals = (c for c in record.choices[::-1] if c.kind in ("refused", "skipped"))
            last = next(refusals, None)
            raise PolicyError(
                f"nothing runs and nobody was admitted in {MAX_IDLE_STEPS} steps;"
                + (f" {last.plugin} on {last.request_id!r}: {last.reason}" if last else "")
            )

    def _measure(self, record: StepRecord) -> None:
        state, ledger, size = self.state, self.state.memory.ledger, self.state.memory.page_size
        table, running = state.table, state.running
        record.waiting, record.running = len(state.waiting), len(state.running)
        record.pages_free, record.pages_tree = ledger.num_free, ledger.num_tree
        record.pages_request = ledger.num_request
        record.pages_evictable = state.memory.cache.num_evictable
        record.pages_evicted, state.memory.pages_evicted = state.memory.pages_evicted, 0
        shared_twice = ledger.request_refs - ledger.num_request
        private = table.computed[running] - table.pages_shared[running] * size
        record.used_tokens = int(np.add.reduce(private)) - shared_twice * size

    def _emit(self, record: StepRecord, got: Got = ((), _NONE, 0)) -> StepEvent:
        record.end_s = self.state.now_s
        ended, self.state.ended = self.state.ended, []
        rows, finished = [sequence.key for sequence in got[0]], [live.record for live in ended]
        event = StepEvent(record, rows, got[1], tuple(finished), got[2])
        for sink in self.sinks:
            sink.step(record)
            for live in ended:
                sink.request(live.record)
        self.hooks.notify("on_step", event)
        for live in ended:
            with self.state.contained(live.request.request_id):
                self.hooks.notify("on_request_finished", RequestEvent(live.request, live.record))
        return event
