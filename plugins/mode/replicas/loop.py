"""The router's loop under a server: requests in, a replica for each, tokens out; lives, deaths."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from core.request import Request
from plugins.mode.replicas.fleet import Came, Fleet
from plugins.mode.replicas.messages import Born, News
from plugins.mode.replicas.overview import Alive, summed, why_not, workers
from plugins.mode.replicas.traffic import Traffic
from plugins.mode.step_totals import StepTotals
from plugins.shared.router import Router
from plugins.shared.routing import ReplicaState
from plugins.shared.server_protocol import Server, Steer

RETRY_AFTER_S = 5.0  # told to clients while there is no replica; one starts in seconds
logger = logging.getLogger(__name__)


class RouterLoop:
    """Serves the clients of `server` by the engines of `fleet`, until the server drains and nothing
    is left. Nothing here waits for a replica: one that takes requests and answers nothing holds up
    its own alone, until the registry gives it up.

    alive: by name. births: how often each was born. left: what those that died had counted in
    their reports, and steps: the sums of all incarnations."""

    def __init__(
        self,
        fleet: Fleet,
        server: Server,
        router: Router,
        traffic: Traffic,
        report_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.alive: dict[str, Alive] = {}
        self.births: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.steps: list[StepTotals] = []
        self.traffic = traffic
        self._fleet = fleet
        self._server = server
        self._router = router
        self._report_s = report_s
        self._now = now
        self._moved_s = self._reported_s = now()
        self._was_ready = False

    def run(self, early: Sequence[Came] = ()) -> None:
        """Serve. early: what was heard of the fleet before."""
        self._server.watch(self._fleet.descriptor)
        for came in early:
            self._hear(came)
        self._report(self._look(self._now()))
        while not (self._server.draining and not self.traffic.streams):
            self.turn()

    def turn(self) -> None:
        """Wait for something to come in, or until a report is due, and see to it."""
        left_s = self._reported_s + self._report_s - self._now()
        self._take(self._server.poll(max(left_s, 0.0)))
        for came in self._fleet.came():
            self._hear(came)
        now_s = self._now()
        ready = self._look(now_s)
        self.traffic.place(now_s)
        self.traffic.flush({name: one.born.birth for name, one in self.alive.items()})
        due = now_s - self._reported_s >= self._report_s
        if due or ready != self._was_ready:
            self._report(ready)

    @property
    def waiting(self) -> int:
        """Token streams that no engine has admitted."""
        return sum(one.waiting for one in self.alive.values()) + self.traffic.parked

    def _take(self, items: Sequence[Request | str | Steer]) -> None:
        if items and not self.traffic.streams:
            self._moved_s = self._now()  # nothing was pending before
        for item in items:
            if isinstance(item, Steer):
                self._router.registry.drain(item.replica, item.draining)
            elif isinstance(item, str):
                self.traffic.abort(item)
            else:
                self.traffic.submit(item)

    def _hear(self, came: Came) -> None:
        if came.born is not None:
            self._born(came.replica, came.born)
            return
        one = self.alive.get(came.replica)
        if one is None or one.born.birth != came.birth:
            if came.lost and not came.birth:
                logger.error("replica %s could not start: %s", came.replica, came.lost)
            return
        for news in came.news:
            self._learn(one, news)
        if came.lost:
            self._lost(came.replica, came.lost)

    def _born(self, name: str, born: Born) -> None:
        incarnation = self._router.registry.join(name, self._now())
        self.alive[name] = Alive(born, incarnation)
        self.births[name] += 1
        if self.births[name] > 1:
            logger.warning("replica %s is back (process %d)", name, born.process_id)

    def _learn(self, one: Alive, news: News) -> None:
        now_s = self._now()
        if news.snapshot is not None and news.state is not None:
            one.state, one.waiting = news.state, news.state["waiting"]
            if one.steps is None:
                pool = news.state["pool"]
                one.steps = StepTotals(pool["page_size"], pool["total"])
                self.steps.append(one.steps)
            self._router.report(one.incarnation, news.snapshot, now_s)
            return
        self._router.registry.heartbeat(one.incarnation, now_s)
        if news.record is not None:
            one.waiting = news.record.waiting
            if one.steps is not None:
                one.steps.add(news.record)
            news.record.waiting = self.waiting
        if news.ended or (news.record is not None and news.record.num_rows):
            self._moved_s = now_s
        self.traffic.take(news)

    def _lost(self, name: str, why: str) -> None:
        one = self.alive.pop(name)
        self._router.fail(one.incarnation, name, why)
        self.left.update(one.state.get("totals", {}))
        self.traffic.lost(name, why)

    def _look(self, now_s: float) -> bool:
        """Give up who has been silent for too long; whether a replica takes requests."""
        self._router.registry.expire(now_s)
        listed = self._router.registry.listed(now_s)
        for known, state in listed:
            if state is ReplicaState.dead and known.replica in self.alive:
                birth = self.alive[known.replica].born.birth
                self._lost(known.replica, known.why)
                self._fleet.restart(known.replica, birth)
        return any(state is ReplicaState.ready for _, state in listed)

    def _report(self, ready: bool) -> None:
        self._reported_s = now_s = self._now()
        self._was_ready = ready
        works = self._was_ready and bool(self.traffic.streams)
        listed = self._router.registry.listed(now_s)
        state = {
            "ready": self._was_ready,
            "reason": "" if self._was_ready else why_not(listed, self._fleet.names),
            "waiting": self.waiting,
            "requests": len(self.traffic.streams),
            "idle_s": now_s - self._moved_s if works else 0.0,
            "retry_after_s": None if self._was_ready else RETRY_AFTER_S,
            "workers": workers(listed, self.alive, self.births, now_s),
        }
        totals = self.left.copy()
        for one in self.alive.values():
            totals.update(one.state.get("totals", {}))
        for reason, count in self.traffic.finished.items():
            totals[f"finished_{reason}"] = count  # a request that moved counts once
        totals["failovers"] = self.traffic.failovers
        self._server.report(state | summed(self.alive) | {"totals": dict(totals)})
