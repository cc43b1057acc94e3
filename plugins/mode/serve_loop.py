"""The engine's loop under a server: requests in, steps, tokens out; faults; the end."""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from core.engine import Engine
from core.errors import EngineStoppedError, RequestError, described
from core.queries import StepEvent
from core.records import RequestRecord
from core.request import Request
from plugins.mode.step_totals import SUMMED, StepTotals
from plugins.shared.server_protocol import Server, Steer

KEPT_REQUESTS = 1000  # ended ones whose latencies the summary tells
FIRST_PAUSE_S = 0.01
logger = logging.getLogger(__name__)


class ServeLoop:
    """Runs `engine` for `server` until that drains and nothing is left.

    Requests come in with the arrival_s and deadline_s of time.perf_counter(), as on a clock that
    front ends share; they are moved to the engine's clock. report_s: period
    of reports, and how long an idle engine sleeps at most.

    An exception from a step is a fault: whatever plugin raised it may have left a step half done,
    so every open request ends with an error, the report says why, and nothing is computed any more.
    So is what an executor's `check` raises, if it has one, which is asked before each report: an
    idle engine hears of a lost device from nobody else.
    faults_end: `run` raises a fault instead, and nobody is told: for who can start another engine.

    An engine in which policies refuse everyone is asked again at once when something comes in, else
    after 10, 20, 40, ... ms; the core gives up on such a policy at the eighth time.

    recent: the last KEPT_REQUESTS records of ended requests; finished: all of them by reason."""

    def __init__(
        self, engine: Engine, server: Server, report_s: float, faults_end: bool = False
    ) -> None:
        memory = engine.state.memory
        self.totals = StepTotals(memory.page_size, memory.ledger.num_pages)
        self.finished: Counter[str] = Counter()
        self.recent: deque[RequestRecord] = deque(maxlen=KEPT_REQUESTS)
        self.fault: Exception | None = None
        self._engine = engine
        self._server = server
        self._report_s = report_s
        self._faults_end = faults_end
        self._clock_ahead_s = engine.clock.now() - time.perf_counter()
        self._reason = ""
        self._open: set[str] = set()
        self._cached_tokens = 0
        self._moved_s = self._reported_s = time.monotonic()
        self._pause_s = FIRST_PAUSE_S
        self._resume_s = 0.0

    def run(self) -> None:
        """Serve. After a fault too it goes on until the server drains: clients get the reason."""
        self._report()
        while True:
            items = self._server.poll(self._patience_s())
            self._take(items)
            if self._server.draining and not self._works():
                return
            if self._works() and self._is_due(items):
                self._step()
            if time.monotonic() - self._reported_s >= self._report_s:
                self._check()
                self._report()

    def _works(self) -> bool:
        return self.fault is None and self._engine.has_work

    def _patience_s(self) -> float:
        if not self._works():
            return self._report_s
        if not self._engine.stalled:
            return 0.0
        return min(max(self._resume_s - time.monotonic(), 0.0), self._report_s)

    def _is_due(self, items: Sequence[Request | str | Steer]) -> bool:
        return bool(items) or not self._engine.stalled or time.monotonic() >= self._resume_s

    def _take(self, items: Sequence[Request | str | Steer]) -> None:
        if items and not self._works():
            self._moved_s = time.monotonic()  # nothing was pending before
        for item in items:
            if isinstance(item, str):
                self._engine.abort(item)
            elif isinstance(item, Request):
                self._submit(item)

    def _submit(self, request: Request) -> None:
        if self.fault is not None:
            self._server.refuse(request.request_id, self._reason)
            return
        ahead_s, deadline_s = self._clock_ahead_s, request.deadline_s
        moved = replace(
            request,
            arrival_s=request.arrival_s + ahead_s,
            deadline_s=None if deadline_s is None else deadline_s + ahead_s,
        )
        try:
            self._engine.submit(moved)
            self._open.add(request.request_id)
        except (RequestError, EngineStoppedError) as error:
            self._server.refuse(request.request_id, str(error))

    def _step(self) -> None:
        try:
            event = self._engine.step()
        except Exception as error:
            self._fail(error)
            return
        self._set_pause()
        if event is None:
            return
        self._server.publish(event, self._engine.records)
        self._account(event)

    def _set_pause(self) -> None:
        if self._engine.stalled:
            self._resume_s = time.monotonic() + self._pause_s
            self._pause_s *= 2
        else:
            self._pause_s = FIRST_PAUSE_S

    def _account(self, event: StepEvent) -> None:
        self.totals.add(event.record)
        if event.record.num_rows or event.finished:
            self._moved_s = time.monotonic()
        for record in event.finished:
            del self._engine.records[record.request_id]
            self._open.discard(record.request_id)
            self.finished[record.finish_reason] += 1
            self._cached_tokens += record.cached_tokens
            self.recent.append(record)

    def _check(self) -> None:
        check = getattr(self._engine.executor, "check", None)
        if check is None or self.fault is not None:
            return
        try:
            check()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._faults_end:
            raise error
        self._reason = f"the engine stopped: {described(error)}"
        self.fault = error
        logger.error("%s; %d requests end", self._reason, len(self._open), exc_info=error)
        for request_id in sorted(self._open):
            self._server.refuse(request_id, self._reason)
        self.finished["error"] += len(self._open)
        self._open.clear()
        self._report()

    def _report(self) -> None:
        self._reported_s = now_s = time.monotonic()
        state, ledger = self._engine.state, self._engine.state.memory.ledger
        pages = {
            "page_size": state.memory.page_size,
            "total": ledger.num_pages,
            "free": ledger.num_free,
            "tree": ledger.num_tree,
            "evictable": state.memory.cache.num_evictable,
            "request": ledger.num_request,
        }
        report = {
            "ready": self.fault is None,
            "reason": self._reason,
            "waiting": len(state.waiting),
            "running": len(state.running),
            "requests": len(self._open),
            "slots": state.config.max_num_seqs,
            "idle_s": now_s - self._moved_s if self._works() else 0.0,
            "pool": pages,
            "totals": self._counts(),
        }
        self._server.report(report)

    def _counts(self) -> dict[str, int]:
        counts = {
            name: self.totals.counts[name] for name in (*SUMMED, "graph_tokens", "preemptions")
        }
        ended = {f"finished_{reason}": count for reason, count in self.finished.items()}
        return counts | ended | {"steps": self.totals.steps, "cached_tokens": self._cached_tokens}
