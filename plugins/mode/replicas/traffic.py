"""The requests of a router: placed, followed, moved when their replica dies, ended once."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping

import numpy as np

from core.clock import Clock
from core.errors import described
from core.protocols import LengthPredictor
from core.queries import StepEvent
from core.records import ChoiceRecord, RequestRecord
from core.request import Request
from plugins.mode.replicas.cell import Cell
from plugins.mode.replicas.fleet import Fleet
from plugins.mode.replicas.messages import Drop, End, News, Order
from plugins.mode.replicas.streams import Stream, stream_of
from plugins.mode.serve_loop import KEPT_REQUESTS
from plugins.shared.router import NoReplicaError, Router
from plugins.shared.routing import Ticket
from plugins.shared.server_protocol import Server

logger = logging.getLogger(__name__)


class Traffic:
    """Every request that has not ended, and where it is.

    One whose replica dies goes on elsewhere, from the tokens that its client has; one that nobody
    can take now waits. A death is blamed on requests as Stream.blame says; who is blamed too often
    runs alone (Cell), and ends with an error if its replica dies all the same.

    recent: the last ended requests; finished: all of them by reason; failovers: moves. on_end: told
    of each that ended."""

    def __init__(
        self,
        fleet: Fleet,
        server: Server,
        router: Router,
        predictor: LengthPredictor,
        clock: Clock,
        seed: int,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        self.recent: deque[RequestRecord] = deque(maxlen=KEPT_REQUESTS)
        self.finished: Counter[str] = Counter()
        self.failovers = 0
        self.streams: dict[str, Stream] = {}
        self._fleet = fleet
        self._server = server
        self._router = router
        self._predictor = predictor
        self._clock = clock
        self._seed = seed
        self._on_end = on_end
        self._ahead_s = clock.now() - time.perf_counter()
        self._records: dict[str, RequestRecord] = {}
        self._parked: deque[Stream] = deque()
        self._cell = Cell(router.registry)
        self._asked: dict[int, Stream] = {}  # by the key of its first choice
        self._choices: dict[int, tuple[tuple[str, int], ChoiceRecord]] = {}  # by key
        self._next_key = 0
        self._orders: dict[str, list[Order]] = {}

    @property
    def parked(self) -> int:
        """Requests without a replica."""
        return len(self._parked) + len(self._cell.suspects)

    def submit(self, request: Request) -> None:
        """A request came in; `place` finds it a replica."""
        request_id = request.request_id
        if request_id in self.streams:
            self._server.refuse(request_id, f"request_id {request_id!r} is still in use")
            return
        try:
            predicted = self._predictor.predict(request)
        except Exception as error:
            self._server.refuse(request_id, described(error))
            return
        arrival_s = request.arrival_s + self._ahead_s
        stream = self.streams[request_id] = stream_of(request, self._seed, predicted, arrival_s)
        self._records[request_id] = stream.record
        self._parked.append(stream)

    def abort(self, request_id: str) -> None:
        """Nobody wants it any more; unknown ones are ignored."""
        stream = self.streams.get(request_id)
        if stream is None:
            return
        stream.aborted = True
        if stream.ticket is not None:
            self._order(stream.ticket.replica, Drop(stream.key))
            return
        (self._parked if stream in self._parked else self._cell.suspects).remove(stream)
        self._refuse(stream, "it was aborted while no replica had it", "abort")

    def place(self, now_s: float) -> None:
        """Send who waits to a replica, as far as there are any. now_s: of the registry's clock."""
        if (alone := self._cell.next(now_s)) is not None:
            stream, replica = alone
            self._try(stream, now_s, [name for name in self._fleet.names if name != replica])
        excluded = () if self._cell.replica is None else (self._cell.replica,)
        while self._parked and self._try(self._parked[0], now_s, excluded):
            self._parked.popleft()

    def flush(self, births: Mapping[str, str]) -> None:
        """Hand over what was ordered. births: of the incarnation that each replica now is."""
        orders, self._orders = self._orders, {}
        for replica, batch in orders.items():
            if replica in births:
                self._fleet.send(replica, births[replica], batch)

    def take(self, news: News) -> None:
        """Pass on what a step of a replica brought, or a refusal."""
        now_s = self._clock.now()
        rows, tokens = self._append(news, now_s)
        ended = [stream for end in news.ended if (stream := self._end(end, now_s)) is not None]
        if news.record is None:
            for stream in ended:
                self._server.refuse(stream.request_id, stream.record.error)
        else:
            finished = tuple([stream.record for stream in ended])
            event = StepEvent(news.record, rows, np.array(tokens, np.int32), finished)
            self._server.publish(event, self._records)
        for stream in ended:
            self._forget(stream)

    def lost(self, replica: str, why: str) -> None:
        """A replica died: what it had goes on elsewhere, before what waits."""
        self._orders.pop(replica, None)
        self._cell.lost(replica)
        left = [
            stream
            for stream in self.streams.values()
            if stream.ticket is not None and stream.ticket.replica == replica
        ]
        again = [stream for stream in left if self._goes_on(stream, why)]
        self._parked.extendleft(reversed(again))
        self.failovers += len(left)
        if left:
            logger.warning("replica %s died with %d requests: %s", replica, len(left), why)

    def _goes_on(self, stream: Stream, why: str) -> bool:
        """Take a stream from a replica that died; whether it goes on as one of many."""
        self._take_back(stream)
        if stream.aborted:
            self._refuse(stream, "it was aborted", "abort")
        elif not stream.blame():
            return True
        elif stream.alone:
            self._refuse(stream, f"replicas died of it, the last one while it ran alone: {why}")
        else:
            self._cell.add(stream)
        return False

    def _append(self, news: News, now_s: float) -> tuple[list[tuple[str, int]], list[int]]:
        """Add the tokens of a step to their streams; returns whose they are, and the tokens. Those
        of a stream that went on elsewhere are dropped."""
        rows: list[tuple[str, int]] = []
        tokens: list[int] = []
        step = 0 if news.record is None else news.record.step
        found = self._choices.get
        for key, token in zip(news.keys, news.tokens, strict=True):
            if (own := found(key)) is not None:
                row, entry = own
                entry.token_ids.append(token)
                entry.times_s.append(now_s)
                entry.steps.append(step)
                rows.append(row)
                tokens.append(token)
        for place, reason in news.finish_reasons.items():
            if (own := found(news.keys[place])) is not None:
                own[1].finish_reason = reason
        for place, scores in news.logprobs.items():
            if (own := found(news.keys[place])) is not None:
                own[1].logprobs[:] = [scores]
        return rows, tokens

    def _try(self, stream: Stream, now_s: float, excluded: Collection[str]) -> bool:
        """Send a stream, or refuse it where that fails; False: no replica takes it now."""
        try:
            ticket = self._router.route(stream.resumed(), stream.predicted, now_s, excluded)
        except NoReplicaError:
            return False
        except Exception as error:
            logger.error("request %r failed", stream.request_id, exc_info=error)
            self._refuse(stream, described(error))
            return True
        self._send(stream, ticket)
        return True

    def _send(self, stream: Stream, ticket: Ticket) -> None:
        stream.ticket, stream.key = ticket, self._next_key
        self._next_key += len(stream.record.choices)
        self._asked[stream.key] = stream
        for index, choice in stream.open_choices():
            self._choices[stream.key + index] = (stream.request_id, index), choice
        self._order(ticket.replica, stream.ask())

    def _take_back(self, stream: Stream) -> None:
        """It is with its replica no longer."""
        if stream.ticket is None:
            return
        self._router.ended(stream.ticket)
        self._cell.ended(stream)
        stream.ticket = None
        del self._asked[stream.key]
        for index in range(len(stream.record.choices)):
            self._choices.pop(stream.key + index, None)

    def _end(self, end: End, now_s: float) -> Stream | None:
        """Complete the record of a request that a replica ended; None for one it has no more."""
        stream = self._asked.get(end.key)
        if stream is None:
            return None
        record = stream.record
        for choice, reason in zip(record.choices, end.finish_reasons, strict=False):
            choice.finish_reason = choice.finish_reason or reason
        record.finish_reason, record.error = end.finish_reason, end.error
        record.cached_tokens = min(end.cached_tokens, record.prompt_tokens)
        record.prompt_logprobs = end.prompt_logprobs
        record.finished_s = now_s
        return stream

    def _refuse(self, stream: Stream, error: str, reason: str = "error") -> None:
        """End a request that is with no replica."""
        stream.record.finish_reason, stream.record.error = reason, error
        stream.record.finished_s = self._clock.now()
        self._server.refuse(stream.request_id, error)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._take_back(stream)
        self._cell.ended(stream)
        del self.streams[stream.request_id], self._records[stream.request_id]
        self.finished[stream.record.finish_reason] += 1
        self.recent.append(stream.record)
        self._on_end(stream.record)
        try:
            self._predictor.observe(stream.record)
        except Exception as error:
            logger.error("a length predictor failed", exc_info=error)

    def _order(self, replica: str, order: Order) -> None:
        self._orders.setdefault(replica, []).append(order)
