"""The engine's side of the server: who asked for what, and what goes back to whom."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.errors import TritiumError
from core.queries import StepEvent
from core.records import RequestRecord, StepRecord
from core.request import Request
from plugins.server.channel import EngineEnd
from plugins.server.client import Ended
from plugins.server.messages import (
    Abort,
    Drain,
    FromFront,
    Goodbye,
    Hello,
    Report,
    StepNews,
    Submit,
    Watch,
)
from plugins.server.restarts import Restarts
from plugins.server.signals import StopSignals
from plugins.server.workers import Workers
from plugins.shared.server_protocol import Steer

LAST_STEPS = 8  # records in a report
MAX_BACKLOG = 16_384  # messages: a front end that takes in none of them hangs
SHUTTING_DOWN = "the server is shutting down"
logger = logging.getLogger(__name__)


class ServerError(TritiumError):
    """The server cannot go on: its front ends are gone, and new ones die."""


@dataclass(slots=True)
class Route:
    """Where a request's tokens go. reason: why the server ended it itself, if it did."""

    front: int
    key: int
    num_choices: int
    scored: bool
    reason: str = ""


class Hub:
    """core.protocols.Server. Front ends are known by their process id.

    Requests come in with the arrival_s and deadline_s of time.perf_counter(), which all processes
    of a machine share. drain_s: what is open so long after a stop signal is aborted. let_go: called
    last by `close`. early: messages that came in already."""

    def __init__(
        self,
        channel: EngineEnd,
        workers: Workers,
        signals: StopSignals,
        drain_s: float,
        let_go: Callable[[], None] = lambda: None,
        early: Sequence[tuple[int, FromFront]] = (),
    ) -> None:
        self.draining = False
        self._channel = channel
        self._workers = workers
        self._signals = signals
        self._drain_s = drain_s
        self._let_go = let_go
        self._early = list(early)
        self._routes: dict[str, Route] = {}
        self._ids: dict[tuple[int, int], str] = {}  # (front end, key) -> request id
        self._submitted: dict[int, int] = {}
        self._watching: set[int] = set()
        self._state: dict[str, Any] | None = None
        self._last_steps: deque[StepRecord] = deque(maxlen=LAST_STEPS)
        self._waiting = 0
        self._restarts = Restarts()
        self._drains_until_s: float | None = None
        self._closed = False
        channel.watch(signals.descriptor)
        for descriptor in workers.sentinels:
            channel.watch(descriptor)

    def watch(self, descriptor: int) -> None:
        """See Server.watch."""
        self._channel.watch(descriptor)

    def poll(self, timeout_s: float) -> list[Request | str | Steer]:
        """See Server.poll. Raises ServerError when no front end is left and new ones die too."""
        early, self._early = self._early, []
        messages, ready = self._channel.receive(0 if early else timeout_s)
        messages = early + messages
        items = [item for front, message in messages for item in self._take(front, message)]
        if self._signals.descriptor in ready:
            self._signals.clear()
        self.draining = self._signals.count > 0
        for descriptor in ready & self._workers.sentinels:
            items += self._lose(descriptor)
        self._replace()
        if self.draining:
            items += self._drain()
        return items

    def refuse(self, request_id: str, error: str) -> None:
        """See Server.refuse."""
        route = self._forget(request_id)
        if route is not None:
            self._end_now(route.front, route.key, error)

    def publish(self, event: StepEvent, records: Mapping[str, RequestRecord]) -> None:
        """See Server.publish."""
        self._waiting = event.record.waiting
        self._last_steps.append(event.record)
        news: dict[int, StepNews] = {front: StepNews() for front in self._watching}
        ended = {record.request_id for record in event.finished}
        tokens = event.token_ids.tolist()
        for (request_id, choice), token in zip(event.rows, tokens, strict=True):
            route = self._routes.get(request_id)
            if route is None:
                continue  # its front end died
            if (own := news.get(route.front)) is None:
                own = news[route.front] = StepNews()
            if route.scored or route.num_choices > 1 or request_id in ended:
                _add_details(own, route, records[request_id], choice)
            own.keys.append(route.key + choice)
            own.tokens.append(token)
        for record in event.finished:
            route = self._forget(record.request_id)
            if route is not None:
                own = news.setdefault(route.front, StepNews())
                own.ended.append((route.key, _ended(record, route.reason)))
        for front, own in news.items():
            own.record = event.record if front in self._watching else None
            self._send_news(front, own)

    def report(self, state: dict[str, Any]) -> None:
        """See Server.report."""
        # Rows would be most of the message.
        self._state = state | {"last_steps": [replace(one, rows=[]) for one in self._last_steps]}
        for front in self._channel.connected:
            self._send_report(front)
            if self._channel.backlog(front) > MAX_BACKLOG:
                logger.error("front end %d takes in nothing any more: it is killed", front)
                self._workers.kill(front)

    def close(self) -> None:
        """See Server.close. After a second signal nobody is waited for."""
        if self._closed:
            return
        self._closed = True
        messages, _ = self._channel.receive(0)
        for front, message in messages:
            self._take(front, message)
        for request_id in list(self._routes):
            self.refuse(request_id, SHUTTING_DOWN)
        for front in self._channel.connected:
            self._channel.send(front, Goodbye(SHUTTING_DOWN))
        self._workers.stop(at_once=self._signals.count > 1)
        self._channel.close()
        self._signals.close()
        self._let_go()

    def _take(self, front: int, message: FromFront) -> list[Request | str | Steer]:
        if isinstance(message, Submit):
            return self._submit(front, message)
        if isinstance(message, Abort):
            request_id = self._ids.get((front, message.key))
            return [] if request_id is None else [request_id]
        if isinstance(message, Drain):
            return [Steer(message.worker, message.on)]
        if isinstance(message, Watch):
            (self._watching.add if message.on else self._watching.discard)(front)
        elif isinstance(message, Hello) and self._state is not None:
            self._send_report(front)
        return []

    def _submit(self, front: int, message: Submit) -> list[Request | str | Steer]:
        request, key = message.request, message.key
        self._submitted[front] = self._submitted.get(front, 0) + 1
        if request.request_id in self._routes:
            error = f"request_id {request.request_id!r} is in use by an unfinished request"
            self._end_now(front, key, error)
            return []
        params = request.params
        self._routes[request.request_id] = Route(front, key, params.n, params.logprobs is not None)
        self._ids[front, key] = request.request_id
        hint_s = request.deadline_s
        deadline_s = None if hint_s is None else message.sent_s + hint_s
        return [replace(request, arrival_s=message.sent_s, deadline_s=deadline_s)]

    def _forget(self, request_id: str) -> Route | None:
        route = self._routes.pop(request_id, None)
        if route is not None:
            del self._ids[route.front, route.key]
        return route

    def _lose(self, descriptor: int) -> list[Request | str | Steer]:
        """A front end died: nobody wants its requests any more. Another will be started."""
        ended = self._workers.ended(descriptor)
        front = ended.front
        self._channel.unwatch(descriptor)
        self._channel.forget(front)
        self._watching.discard(front)
        self._submitted.pop(front, None)
        lost = [request_id for request_id, route in self._routes.items() if route.front == front]
        text = "front end %d died (exit code %s), with %d requests; another one in %.1f s"
        wait_s = self._restarts.died(ended.lived_s, time.monotonic())
        logger.error(text, front, ended.exit_code, len(lost), wait_s)
        for request_id in lost:
            self._forget(request_id)
        if not self._workers.sentinels and (self.draining or self._restarts.hopeless):
            raise ServerError("no front end is left: see the log for how they ended")
        return list(lost)

    def _replace(self) -> None:
        if not self.draining:
            for _ in range(self._restarts.due(time.monotonic())):
                self._workers.start_another()
        for descriptor in self._workers.arrived():
            self._channel.watch(descriptor)

    def _drain(self) -> list[Request | str | Steer]:
        now_s = time.monotonic()
        if self._drains_until_s is None:
            self._drains_until_s = now_s + self._drain_s
            for front in self._channel.connected:
                self._send_report(front)
        if now_s < self._drains_until_s:
            return []
        late = [request_id for request_id, route in self._routes.items() if not route.reason]
        for request_id in late:
            self._routes[request_id].reason = SHUTTING_DOWN
        return list(late)

    def _end_now(self, front: int, key: int, error: str) -> None:
        self._send_news(front, StepNews(ended=[(key, Ended(("error",), error))]))

    def _send_news(self, front: int, news: StepNews) -> None:
        news.submitted, news.open = self._submitted.get(front, 0), len(self._routes)
        news.waiting = self._waiting
        self._channel.send(front, news)

    def _send_report(self, front: int) -> None:
        if self._state is not None:
            submitted = self._submitted.get(front, 0)
            report = Report(self._state, self.draining, submitted, len(self._routes))
            self._channel.send(front, report)


def _add_details(news: StepNews, route: Route, record: RequestRecord, choice: int) -> None:
    """What a token has beside its id. A choice that has ended did so with this very token."""
    place, entry = len(news.keys), record.choices[choice]
    if entry.finish_reason:
        news.finish_reasons[place] = entry.finish_reason
    if route.scored:
        news.logprobs[place] = entry.logprobs[-1]


def _ended(record: RequestRecord, reason: str) -> Ended:
    return Ended(
        tuple(choice.finish_reason for choice in record.choices),
        record.error or (reason if record.finish_reason == "abort" else ""),
        record.cached_tokens,
        record.prompt_logprobs,
    )
