"""Several engines and a router in one simulated time.

What happens next is what comes first: an arrival, or a step of the engine whose clock is furthest
behind; arrivals before steps, and replicas in their order, where times are equal. Engine, policies,
registry and router are those that serve; only the network is missing. What a replica tells
(reports, ends of requests) reaches the router at the time it would, never with the step that will
bring it.
"""

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from core.build import build_engine
from core.config import require
from core.engine import Engine
from core.hooks import Hooks
from core.protocols import LengthPredictor
from core.queries import LengthPredictorQuery, StepEvent
from core.records import RequestRecord
from core.request import Request
from core.table import EndTokens, State
from plugins.mode.pending import Pending
from plugins.mode.true_starts import PromptKeys, Starts
from plugins.shared.clocks import VirtualClock
from plugins.shared.replica_report import Reporter
from plugins.shared.router import Router
from plugins.shared.routing import Ticket
from plugins.shared.session import ClosedLoop, Session

NEVER = 1 << 30  # steps that nobody lives to see


@dataclass(slots=True, eq=False)
class Replica:
    """One engine, with its own clock and plugins. due_s: when its next report is due. parked: it
    has nothing to do, or nothing that it can do before somebody comes. quiet_s: until then surely
    none of its requests ends; kept where others wait for that."""

    index: int
    engine: Engine
    clock: VirtualClock
    reporter: Reporter
    starts: Starts
    incarnation: int = 0
    due_s: float = 0.0
    quiet_s: float = 0.0
    parked: bool = False
    told: bool = True  # nothing has changed since its last report
    tickets: dict[str, Ticket] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the router knows it."""
        return self.reporter.replica

    def listen(self) -> None:
        """Work out quiet_s after a step: every token left is a step of its own, and none is
        shorter than half of one for a single token (tables of measured times may dip)."""
        engine, self.quiet_s = self.engine, self.clock.now()
        model = getattr(engine.executor, "step_time", None)
        if model is None or engine.ending:
            return
        columns = engine.state.table.columns
        live = np.flatnonzero(columns["state"] != State.DONE)
        if (columns["end_tokens"][live] != EndTokens.NONE).any():
            return
        known = columns["known"][live] + columns["in_flight"][live]
        least = int((columns["length_limit"][live] - known).min(initial=NEVER))
        self.quiet_s += least * float(model.seconds(1, 1, 1, 1)) / 2


@contextmanager
def replicas_of(session: Session) -> Iterator[list[Replica]]:
    """Build the replicas of a session, and close them however the mode ends. Each has plugins of
    its own; the session's are the first one's."""
    require(session.hooks_again is not None or session.replicas == 1, "replicas", "1 here", "more")
    again = session.hooks_again
    hooks = [session.hooks] + [again() for _ in range(1, session.replicas) if again is not None]
    prompts = PromptKeys()
    replicas = [_replica(session, index, one, prompts) for index, one in enumerate(hooks)]
    gc.collect()
    gc.freeze()
    try:
        yield replicas
    finally:
        gc.unfreeze()
        for replica in replicas:
            replica.engine.close()


def _replica(session: Session, index: int, hooks: Hooks, prompts: PromptKeys) -> Replica:
    clock = VirtualClock()
    engine = build_engine(
        hooks,
        session.engine,
        _seed(session.run.seed, index),
        clock,
        session.device,
        record_rows=False,
    )
    batching = hooks.registered[hooks.in_charge()["decide_batch"]].plugin
    slice_tokens = getattr(batching, "slice_tokens", session.engine.max_num_batched_tokens)
    return Replica(
        index, engine, clock, Reporter(str(index)), Starts(engine, prompts, slice_tokens)
    )


def _seed(seed: int, index: int) -> int:
    """Of a replica's own draws (launch times, victims at random): the run's for the first one."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])


class Fleet:
    """Runs requests through replicas. on_event: told of each step; on_sent: of each request and the
    replica that got it, before it gets there."""

    def __init__(
        self,
        replicas: list[Replica],
        router: Router,
        session: Session,
        pending: Pending,
        closed: ClosedLoop | None,
        on_event: Callable[[Replica, StepEvent], None],
        on_sent: Callable[[Replica, Request], None],
    ) -> None:
        self.replicas = replicas
        self.router = router
        self._by_name = {replica.name: replica for replica in replicas}
        self._interval_s = session.router.snapshot_interval_s
        self._delay_s = session.router.snapshot_delay_s
        self._pending = pending
        self._closed = closed
        self._on_event = on_event
        self._on_sent = on_sent
        self._oracle = session.hooks.oracle
        seed = LengthPredictorQuery(session.run.seed)
        self._predictor: LengthPredictor = session.hooks.build("build_length_predictor", seed)
        self._awake = [(0.0, replica.index) for replica in replicas]
        self._stalled: list[Replica] = []
        self._mail: list[tuple[float, int, Callable[[float], object]]] = []
        self._num_mailed = 0
        for replica in replicas:
            replica.incarnation = router.registry.join(replica.name, 0.0)
            snapshot = replica.reporter.snapshot(replica.engine)
            router.report(replica.incarnation, snapshot, 0.0)
            replica.due_s = self._interval_s

    def run(self, arrived: Callable[[Request], None], before_step: Callable[[], None]) -> None:
        """To the end of the last request. arrived: told of each that comes; before_step: called
        when all who came until then are in."""
        pending = self._pending
        while pending or self._awake or self._stalled:
            if pending and (not self._awake or pending.next_s <= self._awake[0][0]):
                request = pending.pop()
                arrived(request)
                self._send(request)
                continue
            if not self._awake:  # nobody comes: the engine says whose fault it is
                self._wake_stalled(0.0)
            before_step()
            self._step(self.replicas[heapq.heappop(self._awake)[1]])
        self._read_mail(float("inf"))

    def _send(self, request: Request) -> None:
        now_s = request.arrival_s
        self._read_mail(now_s)
        self._report_parked(now_s)
        self._read_mail(now_s)
        shown = request if self._oracle else replace(request, forced_output=None)
        predicted = min(self._predictor.predict(shown), float(request.params.max_tokens))
        ticket = self.router.route(request, predicted, now_s)
        replica = self._by_name[ticket.replica]
        self._on_sent(replica, request)
        replica.starts.sent(request)
        replica.tickets[request.request_id] = ticket
        replica.engine.submit(request)
        replica.quiet_s = min(replica.quiet_s, now_s)  # it may be refused at once
        replica.reporter.received = ticket.number
        self._wake_stalled(now_s)
        if replica.parked:
            self._wake(replica, now_s)

    def _step(self, replica: Replica) -> None:
        engine, from_s = replica.engine, replica.clock.now()
        event = engine.step(self._until_s(replica))
        steps = 1 if event is None else event.record.steps
        replica.starts.stepped((replica.clock.now() - from_s) / steps)
        if self._closed is not None:
            replica.listen()
        replica.told = False
        if event is not None:
            replica.reporter.took(event.record)
            self._on_event(replica, event)
            for record in event.finished:
                self._ended(replica, record)
        now_s = replica.clock.now()
        if now_s >= replica.due_s:
            self._report(replica, now_s)
        if engine.stalled or not engine.has_work:
            replica.parked = True
            if engine.has_work:
                self._stalled.append(replica)
        else:
            heapq.heappush(self._awake, (now_s, replica.index))

    def _until_s(self, replica: Replica) -> float:
        """Nobody comes to this engine before, and it need not report."""
        if self._closed is not None and replica.engine.ending:
            return 0.0
        until_s = self._pending.next_s
        if len(self.replicas) > 1:
            until_s = min(until_s, replica.due_s)
            if self._closed is not None:  # whose ends bring somebody
                others = (other.quiet_s for other in self.replicas if other is not replica)
                until_s = min(until_s, *others)
        return until_s

    def _ended(self, replica: Replica, record: RequestRecord) -> None:
        ended_s = record.finished_s or 0.0
        for request in () if self._closed is None else self._closed.follow_up(record):
            self._pending.add(request, ended_s)
        ticket = replica.tickets.pop(record.request_id)
        self._post(ended_s, lambda _: self._learn(ticket, record))

    def _learn(self, ticket: Ticket, record: RequestRecord) -> None:
        self.router.ended(ticket)
        self._predictor.observe(record)

    def _wake_stalled(self, now_s: float) -> None:
        stalled, self._stalled = self._stalled, []
        for replica in stalled:
            self._wake(replica, now_s)

    def _wake(self, replica: Replica, now_s: float) -> None:
        if replica.parked:
            replica.parked = False
            replica.clock.wait_until(now_s)
            heapq.heappush(self._awake, (replica.clock.now(), replica.index))

    def _report(self, replica: Replica, made_s: float) -> None:
        """Make a report now; it is on its way for a while."""
        snapshot = replica.reporter.snapshot(replica.engine)
        replica.told = True
        receive = partial(self.router.report, replica.incarnation, snapshot)
        self._post(made_s + self._delay_s, receive)
        replica.due_s = (made_s // self._interval_s + 1) * self._interval_s

    def _report_parked(self, now_s: float) -> None:
        """Those with nothing to do report, too; nothing has changed since it became due."""
        for replica in self.replicas:
            if replica.parked and not replica.told and replica.due_s <= now_s:
                self._report(replica, replica.due_s)

    def _post(self, time_s: float, read: Callable[[float], object]) -> None:
        self._num_mailed += 1
        heapq.heappush(self._mail, (time_s, self._num_mailed, read))

    def _read_mail(self, now_s: float) -> None:
        while self._mail and self._mail[0][0] <= now_s:
            time_s, _, read = heapq.heappop(self._mail)
            read(time_s)
