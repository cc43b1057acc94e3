"""Mode bench: serve a workload to its end and measure it."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from core.clock import Clock
from core.engine import Engine
from core.queries import StepEvent
from core.records import RequestRecord
from core.request import Request
from plugins.mode.bounds import Bounds
from plugins.mode.device_lock import check_lock, lock_of
from plugins.mode.outlet import Outlet
from plugins.mode.pending import Pending
from plugins.mode.progress import ProgressBar
from plugins.mode.request_totals import RequestTotals
from plugins.mode.run_facts import check_all_asked, head, summary_of_hooks
from plugins.mode.running import running
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import summary_of
from plugins.mode.warm_up import warm_up
from plugins.shared.clocks import RealClock
from plugins.shared.measure import Window
from plugins.shared.prediction_error import MeasuredPredictor
from plugins.shared.run_info import SinkQuery
from plugins.shared.session import ClosedLoop, Session, closed_loop, described

CHECK_S = 1.0
"""How often an executor is asked whether it is lost while nothing is to be computed."""
logger = logging.getLogger(__name__)


class Bench:
    """Requests enter at their arrival times whatever the engine does, those of a closed loop when
    what they wait for has ended; the run ends when all have ended.

    warmup: prefill and decode a throw-away sequence first; it is in no record and no policy sees
    it, and the clock starts after it. lock: one bench a device: fail at once, wait for the other,
    or off. Under a virtual clock neither applies: nothing is measured on a device. In real
    time on a CUDA device sinks have a thread of their own (plugins/mode/outlet.py).
    """

    name = "bench"  # in summaries
    bounded = False  # with plugins/mode/bounds.py

    def __init__(self, warmup: bool = True, lock: str = "fail") -> None:
        check_lock(lock)
        self.warmup = warmup
        self.lock = lock

    def run(self, session: Session) -> dict[str, Any]:
        """Run it; returns the summary (plugins.mode.summary.summarise, and who decided)."""
        timed = isinstance(session.clock, RealClock)
        with lock_of(session, self.lock), running(session) as (engine, outlet):
            return self._serve(session, engine, outlet, timed and self.warmup)

    def _serve(
        self, session: Session, engine: Engine, outlet: Outlet, warms: bool
    ) -> dict[str, Any]:
        tokenizer = engine.executor.tokenizer
        requests = session.workload.requests(
            tokenizer, engine.executor.vocab_size, session.run.seed
        )
        executor = engine.executor
        facts = executor.describe() | {"vocab_size": executor.vocab_size}
        session.run.manifest["executor"] = facts
        session.run.manifest["workload"] = described(session.workload)
        if warms:
            warm_up(engine)
        summary = self._measured(session, engine, outlet, requests)
        check_all_asked(session.hooks, session.engine.strict)
        return summary

    def _measured(
        self, session: Session, engine: Engine, outlet: Outlet, requests: Sequence[Request]
    ) -> dict[str, Any]:
        """Serve the requests with sinks that open now and close with the summary."""
        bounds = self._bounds(session, engine, requests) if self.bounded else None
        query, compiled = SinkQuery(session.run, str(session.folder)), Compiled(engine)
        outlet.open(session.hooks.build_all("build_sink", query))
        try:
            engine.state.predictor = predictor = MeasuredPredictor(engine.state.predictor)
            summary = self._summary(session, *self._replay(session, engine, requests))
            summary["prediction"] = predictor.error()
            summary["compiled"] = compiled.summary()
            summary["bounds"] = None if bounds is None else bounds.summary()
            session.hooks.notify("on_run_end", summary)
        except BaseException as error:
            outlet.fail(error)
            raise
        outlet.close(session.run, summary)
        return summary

    def _bounds(self, session: Session, engine: Engine, requests: Sequence[Request]) -> Bounds:
        """Bounds of this run, fed from now on."""
        bounds = Bounds(engine, None if closed_loop(session.workload) else requests)
        engine.sinks.append(bounds)
        return bounds

    def _replay(
        self, session: Session, engine: Engine, requests: Sequence[Request]
    ) -> tuple[RequestTotals, StepTotals]:
        """Submit by arrival time, step until nothing is left. A request that has ended is counted
        once those who came meanwhile are in, and let go."""
        memory, clock = engine.state.memory, session.clock
        totals = StepTotals(memory.page_size, memory.ledger.num_pages)
        pending, closed = Pending(requests), closed_loop(session.workload)
        num_requests = len(requests) if closed is None else closed.total_requests
        window = Window(num_requests, session.measure)
        ended, counted = deque[RequestRecord](), RequestTotals(window, session.slo)
        engine.records.clear()  # of a warm-up
        session.hooks.notify("on_run_start", session.run)
        if isinstance(clock, RealClock):
            clock.restart()
        with ProgressBar(session.progress, num_requests, totals.pool_pages) as bar:
            while pending or engine.has_work:
                while pending.next_s <= clock.now():
                    request = pending.pop()
                    window.arrived(request.arrival_s)
                    engine.submit(request)
                while ended:
                    counted.add(record := ended.popleft())
                    del engine.records[record.request_id]
                waits = closed is not None and engine.ending
                event = engine.step(0.0 if waits else pending.next_s)
                if event is not None:
                    totals.measure_from_s, totals.measure_to_s = window.from_s, window.to_s
                    totals.add(event.record)
                    bar.update(event)
                    ended.extend(event.finished)
                    if closed is not None:
                        _follow_up(closed, event, pending)
                if pending and (engine.stalled or not engine.has_work):
                    _wait_until(pending.next_s, engine, clock)
        for record in engine.records.values():
            counted.add(record)
        return counted, totals

    def _summary(
        self, session: Session, counted: RequestTotals, totals: StepTotals
    ) -> dict[str, Any]:
        run = session.run
        return {
            **head(session, self.name, session.workload.name),
            "device": session.device,
            "simulated": run.manifest["executor"].get("step_time"),
            **summary_of(counted, totals),
            "hooks": run.hooks,
            "plugins": summary_of_hooks(session.hooks),
        }


def _follow_up(workload: ClosedLoop, event: StepEvent, pending: Pending) -> None:
    for record in event.finished:
        for request in workload.follow_up(record):
            pending.add(request, record.finished_s or 0.0)


def _wait_until(time_s: float, engine: Engine, clock: Clock) -> None:
    """An executor that can say whether it is lost (`check`) is asked again and again meanwhile."""
    check = getattr(engine.executor, "check", None)
    if check is not None:
        while (next_s := clock.now() + CHECK_S) < time_s:
            clock.wait_until(next_s)
            check()
    clock.wait_until(time_s)


class Compiled:
    """Kernels compiled from now on, where the executor has a `watch` whose list `compiled` names
    them (plugins/executor/compile_watch.py)."""

    def __init__(self, engine: Engine) -> None:
        watch = getattr(engine.executor, "watch", None)
        self._all: list[Any] | None = None if watch is None else watch.compiled
        self._before = len(self._all or ())

    def summary(self) -> dict[str, Any] | None:
        """How many, the seconds that took, and their names; logged if there are any. None: nobody
        watched."""
        if self._all is None:
            return None
        new = self._all[self._before :]
        seconds, names = sum(one.seconds for one in new), [one.kernel for one in new]
        if new:
            text = "%d kernels were compiled while requests waited (%.1f s): %s"
            logger.warning(text, len(new), seconds, ", ".join(sorted(set(names))))
        return {"count": len(new), "seconds": seconds, "kernels": names}
