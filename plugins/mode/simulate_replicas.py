"""Several replicas behind a router in simulated time: records, and the summary of them all.

Beside a plain simulation's figures, of all requests and of the mean replica while it computes, the
summary holds `replicas`: figures of routing (route_totals.py) and of each replica. routes.jsonl
has a line for each decision: a plugins.shared.routing.RouteRecord, the tokens found cached where it
went, when it should start there, and its regret. Sinks get requests alone: a step is one replica's.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

from core.queries import StepEvent
from core.records import RequestRecord
from core.request import Request
from plugins.mode.fleet import Fleet, Replica, replicas_of
from plugins.mode.outlet import Receivers
from plugins.mode.pending import Pending
from plugins.mode.progress import ProgressBar
from plugins.mode.request_totals import RequestTotals
from plugins.mode.route_totals import RouteTotals, TrueStarts
from plugins.mode.run_facts import check_all_asked, head, summary_of_hooks
from plugins.mode.step_totals import StepTotals, merged
from plugins.mode.summary import summary_of
from plugins.shared.measure import Window
from plugins.shared.prediction_error import MeasuredPredictor, error_of_all
from plugins.shared.prefix_view import PrefixView
from plugins.shared.replica_registry import Registry
from plugins.shared.router import HOOK, Router
from plugins.shared.run_info import SinkQuery
from plugins.shared.session import Records, Session, closed_loop, described

NEVER_S = float("inf")  # nobody falls silent in a simulation


def simulate_replicas(session: Session, regret: bool) -> dict[str, Any]:
    """Run it; returns the summary. regret: work out for each decision what a greedy oracle would
    have chosen (some 0.1 ms of host time a replica)."""
    label_oracle(session)
    with replicas_of(session) as replicas:
        executor = replicas[0].engine.executor
        workload, seed = session.workload, session.run.seed
        requests = workload.requests(executor.tokenizer, executor.vocab_size, seed)
        session.run.manifest["executor"] = executor.describe()
        session.run.manifest["workload"] = described(workload)
        with sinks_of(session) as sinks, lines_of(session) as lines:
            play = Play(session, replicas, requests, sinks, lines, regret)
            play.run()
            summary = play.summary()
            for replica in replicas:
                replica.engine.hooks.notify("on_run_end", summary)
            for sink in sinks.sinks:
                sink.close(session.run, summary)
    check_all_asked(session.hooks, session.engine.strict)
    return summary


class Play:
    """A workload through replicas, and the sums over it."""

    def __init__(
        self,
        session: Session,
        replicas: list[Replica],
        requests: Sequence[Request],
        sinks: Receivers,
        lines: IO[str] | None,
        regret: bool,
    ) -> None:
        self._session = session
        self._replicas = replicas
        self._sinks = sinks
        self._closed = closed_loop(session.workload)
        closed = self._closed
        self._num_requests = len(requests) if closed is None else closed.total_requests
        self._pending = Pending(requests)
        self._window = Window(self._num_requests, session.measure)
        self._ended: deque[tuple[Replica, RequestRecord]] = deque()
        self._counted = RequestTotals(self._window, session.slo)
        self._each = [RequestTotals(self._window, session.slo) for _ in replicas]
        self._steps = [_step_totals(replica) for replica in replicas]
        self._predictors = [_measured(replica) for replica in replicas]
        starts = TrueStarts([replica.starts for replica in replicas])
        self._routes = RouteTotals(lines, starts if regret else None)
        registry, view = Registry(NEVER_S, NEVER_S), PrefixView(session.router.block_tokens)
        seed, decided = session.run.seed, self._routes.decided
        self._router = Router(session.hooks, registry, view, seed, decided, starts.of)

    def run(self) -> None:
        """From the first arrival to the last end."""
        session = self._session
        for replica in self._replicas:
            replica.engine.hooks.notify("on_run_start", session.run)
        pool = sum(steps.pool_pages for steps in self._steps)
        with ProgressBar(session.progress, self._num_requests, pool) as self._bar:
            pending, told = self._pending, (self._took, self._sent)
            fleet = Fleet(self._replicas, self._router, session, pending, self._closed, *told)
            fleet.run(lambda request: self._window.arrived(request.arrival_s), self._count)
        self._count()

    def summary(self) -> dict[str, Any]:
        """Of all of it."""
        session = self._session
        executor = session.run.manifest["executor"]
        busy_s = [steps.busy_s for steps in self._steps]
        each = zip(self._replicas, self._each, self._steps, strict=True)
        return {
            **head(session, "simulate", session.workload.name),
            "device": session.device,
            "simulated": executor.get("step_time"),
            **summary_of(self._counted, merged(self._steps)),
            "hooks": session.run.hooks,
            "plugins": self._usage(),
            "prediction": error_of_all(self._predictors),
            "compiled": None,
            "bounds": None,
            "replicas": {
                "count": len(self._replicas),
                "router": session.run.hooks[HOOK],
                **self._routes.summary(busy_s),
                "each": [_of_one(one.name, requests, steps) for one, requests, steps in each],
            },
        }

    def _usage(self) -> list[dict[str, Any]]:
        """Who was asked, at all replicas together."""
        first, *others = (summary_of_hooks(replica.engine.hooks) for replica in self._replicas)
        for other in others:
            for line, more in zip(first, other, strict=True):
                line["asked"] += more["asked"]
                line["answered"] += more["answered"]
        return first

    def _took(self, replica: Replica, event: StepEvent) -> None:
        steps = self._steps[replica.index]
        steps.measure_from_s, steps.measure_to_s = self._window.from_s, self._window.to_s
        steps.add(event.record)
        self._bar.update(event)
        for record in event.finished:
            self._ended.append((replica, record))
            self._sinks.take([record])
        self._sinks.check()

    def _sent(self, replica: Replica, request: Request) -> None:
        loads = [self._router.registry.num_open(one.name) for one in self._replicas]
        loads[replica.index] -= 1
        self._routes.sent(replica.index, request, replica.starts.cached(request), loads)

    def _count(self) -> None:
        """Requests that have ended, once all who came meanwhile are in, and let them go."""
        while self._ended:
            replica, record = self._ended.popleft()
            self._counted.add(record)
            self._each[replica.index].add(record)
            del replica.engine.records[record.request_id]


def label_oracle(session: Session) -> None:
    """A router that is told the truth: the run says so."""
    plugin = session.hooks.registered.get(session.hooks.in_charge().get(HOOK, ""))
    run, label = session.run, " (oracle)"
    told = plugin is not None and getattr(plugin.plugin, "oracle", False)
    if told and not run.policy.endswith(label):
        session.run = replace(run, policy=run.policy + label)


@contextmanager
def sinks_of(session: Session) -> Iterator[Receivers]:
    """The sinks of a run; told if it breaks, else left to the caller to close."""
    query = SinkQuery(session.run, str(session.folder))
    sinks = session.hooks.build_all("build_sink", query)
    try:
        yield Receivers(sinks)
    except BaseException as error:
        for sink in sinks:
            if hasattr(sink, "fail"):
                sink.fail(error)
        raise


@contextmanager
def lines_of(session: Session) -> Iterator[IO[str] | None]:
    """routes.jsonl of a run, unless it records its summary alone."""
    if session.records is Records.summary:
        yield None
        return
    with open(session.folder / "routes.jsonl", "w", encoding="utf-8") as lines:
        yield lines


def _step_totals(replica: Replica) -> StepTotals:
    memory = replica.engine.state.memory
    return StepTotals(memory.page_size, memory.ledger.num_pages)


def _measured(replica: Replica) -> MeasuredPredictor:
    state = replica.engine.state
    measured = MeasuredPredictor(state.predictor)
    state.predictor = measured
    return measured


def _of_one(name: str, requests: RequestTotals, steps: StepTotals) -> dict[str, Any]:
    """What of a replica's own summary tells replicas apart."""
    summary = summary_of(requests, steps)
    names = "requests", "tokens", "hit_rate", "preemptions", "evicted_pages", "kv", "batch"
    latency = {name: summary["latency"][name] for name in ("ttft_s", "e2e_s")}
    picked = {name: summary[name] for name in names}
    return {"replica": name, **picked, "busy_s": steps.busy_s, "latency": latency}
