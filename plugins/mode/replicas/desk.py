"""The server of a replica's engine: its clients are all behind the router."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from core.engine import Engine
from core.queries import StepEvent
from core.records import RequestRecord
from core.request import Request
from plugins.mode.replicas.devices import DeviceWatch
from plugins.mode.replicas.messages import Ask, End, News, Order, Orders
from plugins.shared.replica_report import Reporter


@dataclass(frozen=True, slots=True)
class _Asked:
    key: int
    detailed: bool  # its tokens may have more than an id each


class Desk:
    """plugins.shared.server_protocol.Server for the engine's thread; `take`, `news` and `stop` are
    for other threads.

    device: the facts that go with each report."""

    def __init__(self, engine: Engine, reporter: Reporter, device: DeviceWatch) -> None:
        self.draining = False
        self._engine = engine
        self._reporter = reporter
        self._device = device
        self._inbox: SimpleQueue[Orders | None] = SimpleQueue()
        self._outbox: SimpleQueue[News | None] = SimpleQueue()
        self._early: dict[int, Orders] = {}
        self._next = 0  # number of the batch of orders that comes next
        self._asked: dict[str, _Asked] = {}
        self._ids: dict[int, str] = {}

    def take(self, number: int, orders: Orders) -> None:
        """Orders from the router; batches count from 0 and may come out of turn, or twice. One
        thread at a time."""
        if number >= self._next:
            self._early[number] = orders
        while (due := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._inbox.put(due)

    def news(self) -> Iterator[list[News]]:
        """All that the engine has to say, as it comes, until it has ended."""
        while True:
            batch = [self._outbox.get()]
            while batch[-1] is not None and not self._outbox.empty():
                batch.append(self._outbox.get())
            known = [one for one in batch if one is not None]
            if known:
                yield known
            if batch[-1] is None:
                return

    def stop(self) -> None:
        """Let the engine end what it has, and stop."""
        self.draining = True
        self._inbox.put(None)  # wake it

    def fail(self, reason: str) -> None:
        """The engine broke: the last news."""
        self._outbox.put(News(fault=reason))
        self._outbox.put(None)

    def poll(self, timeout_s: float) -> Sequence[Request | str]:
        """See Server.poll."""
        items: list[Request | str] = []
        try:
            batch = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                if batch is not None:
                    later_s = time.perf_counter() - batch.sent_s
                    items += [item for order in batch.orders for item in self._read(order, later_s)]
                batch = self._inbox.get_nowait()
        except Empty:
            return items

    def refuse(self, request_id: str, error: str) -> None:
        """See Server.refuse."""
        key = self._forget(request_id)
        self._outbox.put(News(ended=[End(key, "error", ("error",), error)]))

    def publish(self, event: StepEvent, records: Mapping[str, RequestRecord]) -> None:
        """See Server.publish."""
        self._reporter.took(event.record)
        news = News(tokens=event.token_ids.tolist(), record=event.record)
        ended = {record.request_id for record in event.finished}
        for place, (request_id, choice) in enumerate(event.rows):
            asked = self._asked[request_id]
            news.keys.append(asked.key + choice)
            if asked.detailed or request_id in ended:
                entry = records[request_id].choices[choice]
                if entry.finish_reason:
                    news.finish_reasons[place] = entry.finish_reason
                if entry.logprobs:
                    news.logprobs[place] = entry.logprobs[-1]
        for record in event.finished:
            news.ended.append(_end(self._forget(record.request_id), record))
        self._outbox.put(news)

    def report(self, state: dict[str, Any]) -> None:
        """See Server.report."""
        snapshot = self._reporter.snapshot(self._engine, self._device.facts)
        self._outbox.put(News(state=state, snapshot=snapshot))

    def watch(self, descriptor: int) -> None:
        """See Server.watch."""
        raise NotImplementedError(f"an engine waits for its router alone, not for {descriptor}")

    def close(self) -> None:
        """See Server.close."""
        self._outbox.put(None)

    def _read(self, order: Order, later_s: float) -> list[Request | str]:
        if not isinstance(order, Ask):
            request_id = self._ids.get(order.key)
            return [] if request_id is None else [request_id]
        request, deadline_s = order.request, order.request.deadline_s
        detailed = request.params.n > 1 or request.params.logprobs is not None
        self._reporter.received = max(self._reporter.received, order.ticket)
        self._asked[request.request_id] = _Asked(order.key, detailed)
        self._ids[order.key] = request.request_id
        moved_s = None if deadline_s is None else deadline_s + later_s
        return [replace(request, arrival_s=request.arrival_s + later_s, deadline_s=moved_s)]

    def _forget(self, request_id: str) -> int:
        key = self._asked.pop(request_id).key
        del self._ids[key]
        return key


def _end(key: int, record: RequestRecord) -> End:
    reasons = tuple([choice.finish_reason for choice in record.choices])
    facts = record.error, record.cached_tokens, record.prompt_logprobs
    return End(key, record.finish_reason, reasons, *facts)
