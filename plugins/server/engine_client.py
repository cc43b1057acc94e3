"""A front end's client: requests go to the engine's process, tokens come back, a message a step."""

import asyncio
import multiprocessing
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from core.records import StepRecord
from core.request import Request
from plugins.server.channel import FrontEnd
from plugins.server.client import Busy, Ended, Facts, State, Token, Unavailable, Update
from plugins.server.messages import (
    Abort,
    Drain,
    FromEngine,
    Goodbye,
    Report,
    StepNews,
    Submit,
    Watch,
    step_facts,
)
from plugins.server.settings import Settings

FEED_STEPS = 256  # records kept for a slow reader of the feed


class EngineClient:
    """plugins.server.client.Client over a channel. Made and used in one running asyncio loop.

    closed: set when nothing more comes: the engine said goodbye, or its process is gone. front:
    tells front ends apart; several in one process need numbers of their own."""

    def __init__(
        self, address: str, facts: Facts, settings: Settings, front: int | None = None
    ) -> None:
        self.facts = facts
        self.closed = asyncio.Event()
        self._settings = settings
        self._choices: dict[int, tuple[EngineStream, int]] = {}
        self._streams: dict[str, EngineStream] = {}
        self._feeds: set[_Feed] = set()
        self._next_key = 0
        self._submitted = 0
        self._queue = _Queue()
        self._report: Report | None = None
        self._last_steps: list[dict[str, Any]] | None = None
        self._heard_s = time.monotonic()
        self._gone = ""
        self._messages = 0
        self._parent = multiprocessing.parent_process()
        self._end = FrontEnd(address, self._take, os.getpid() if front is None else front)
        if self._parent is not None:
            asyncio.get_running_loop().add_reader(self._parent.sentinel, self._lost)

    def submit(self, request: Request) -> "EngineStream":
        """See Client.submit."""
        reason = self._unready()
        if reason:
            told = None if self._report is None else self._report.state.get("retry_after_s")
            raise Unavailable(reason, told)
        waiting = self._queue.waiting + self._submitted - self._queue.submitted
        if waiting >= self._settings.max_queue:
            raise Busy(max(waiting, 0), self._settings.max_queue)
        stream = EngineStream(request.request_id, self._next_key, request.params.n)
        self._next_key += request.params.n
        for choice in range(request.params.n):
            self._choices[stream.key + choice] = (stream, choice)
        self._streams[request.request_id] = stream
        self._submitted += 1
        self._end.send(Submit(stream.key, time.perf_counter(), request))
        return stream

    def abort(self, request_id: str) -> None:
        """See Client.abort."""
        stream = self._streams.get(request_id)
        if stream is not None and not self._gone:
            self._end.send(Abort(stream.key))

    def drain(self, worker: str, on: bool) -> None:
        """See Client.drain."""
        if not self._gone:
            self._end.send(Drain(worker, on))

    def state(self) -> State:
        """See Client.state."""
        reason, age_s = self._unready(), time.monotonic() - self._heard_s
        if self._report is None:
            return State(False, reason or "the engine has not reported yet", age_s)
        state = self._report.state
        if self._last_steps is None:
            self._last_steps = [step_facts(record) for record in state["last_steps"]]
        return State(
            ready=not reason,
            reason=reason,
            age_s=age_s,
            draining=self._report.draining,
            waiting=state["waiting"],
            running=state["running"],
            requests=state["requests"],
            pool=state["pool"],
            totals=state["totals"],
            last_steps=self._last_steps,
            workers=state.get("workers"),
        )

    async def steps(self) -> AsyncIterator[dict[str, Any]]:
        """See Client.steps."""
        feed = _Feed()
        self._feeds.add(feed)
        self._watch(len(self._feeds) == 1)
        try:
            while not self._gone:
                records, lost = await feed.take()
                for record in records:
                    yield step_facts(record) | ({"lost": lost} if lost else {})
                    lost = 0
        finally:
            self._feeds.discard(feed)
            self._watch(not self._feeds)

    def close(self) -> None:
        """Let go of the channel. Open streams end with an error."""
        self._finish("the front end was closed")
        self._end.close()
        if self._parent is not None:
            asyncio.get_running_loop().remove_reader(self._parent.sentinel)

    def _watch(self, changed: bool) -> None:
        if changed and not self._gone:
            self._end.send(Watch(bool(self._feeds)))

    def _unready(self) -> str:
        """Why nothing new is served; "" if it is."""
        if self._gone:
            return self._gone
        limit_s, age_s = self._settings.stuck_s, time.monotonic() - self._heard_s
        if self._report is not None and not self._report.state["ready"]:
            return str(self._report.state["reason"])
        if self._report is not None and self._report.draining:
            return "the server is shutting down"
        if age_s > limit_s:
            return f"the engine is stuck: nothing was heard of it for {age_s:.1f} s"
        if self._report is None:
            return ""  # it is about to start
        state = self._report.state
        if state["idle_s"] > limit_s:
            return (
                f"the engine is stuck: {state['requests']} requests are pending and nothing was"
                f" computed for {state['idle_s']:.1f} s"
            )
        return ""

    def _take(self, message: FromEngine) -> None:
        self._heard_s = time.monotonic()
        if self._gone:
            return  # no stream is left that it could be for
        if isinstance(message, StepNews):
            self._take_step(message)
        elif isinstance(message, Report):
            self._report, self._last_steps = message, None
            self._queue.slots = message.state["slots"]
            self._queue.update(message.submitted, message.state["waiting"], message.open)
        elif isinstance(message, Goodbye):
            self._finish(message.reason)

    def _take_step(self, news: StepNews) -> None:
        self._messages += 1
        self._queue.update(news.submitted, news.waiting, news.open)
        reasons, logprobs = news.finish_reasons, news.logprobs
        for index, (key, token) in enumerate(zip(news.keys, news.tokens, strict=True)):
            stream, choice = self._choices[key]
            stream.add(
                Token(choice, token, logprobs.get(index), reasons.get(index, "")), self._messages
            )
        for key, ended in news.ended:
            self._end_stream(self._choices[key][0], ended)
        if news.record is not None:
            for feed in self._feeds:
                feed.put(news.record)

    def _end_stream(self, stream: "EngineStream", ended: Ended) -> None:
        for key in range(stream.key, stream.key + stream.num_choices):
            del self._choices[key]
        del self._streams[stream.request_id]
        stream.end(ended, self._messages)

    def _lost(self) -> None:
        assert self._parent is not None, "only a child process watches its parent"
        asyncio.get_running_loop().remove_reader(self._parent.sentinel)
        self._parent = None
        self._finish("the engine's process is gone")

    def _finish(self, reason: str) -> None:
        self._gone = self._gone or reason
        self._messages += 1
        for stream in list(self._streams.values()):
            self._end_stream(stream, Ended(("error",) * stream.num_choices, reason))
        for feed in self._feeds:
            feed.wake()
        self.closed.set()


class EngineStream:
    """plugins.server.client.Stream: one reader."""

    __slots__ = ("_last", "_over", "_reader", "_update", "key", "num_choices", "request_id")

    def __init__(self, request_id: str, key: int, num_choices: int) -> None:
        self.request_id = request_id
        self.key = key
        self.num_choices = num_choices
        self._update: Update | None = None
        self._reader: asyncio.Future[None] | None = None
        self._last = 0  # number of the message that was added last
        self._over = False

    def __aiter__(self) -> "EngineStream":
        """Itself."""
        return self

    async def __anext__(self) -> Update:
        """The next update."""
        while self._update is None:
            if self._over:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        update, self._update = self._update, None
        return update

    def add(self, token: Token, message: int) -> None:
        """Another token, of a message with this number."""
        self._open_update(message).tokens.append(token)

    def end(self, ended: Ended, message: int) -> None:
        """The request's end."""
        self._open_update(message).ended = ended
        self._over = True

    def _open_update(self, message: int) -> Update:
        update = self._update
        if update is None:
            update = self._update = Update([])
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)
        elif message != self._last:
            update.steps += 1
        self._last = message
        return update


class _Queue:
    """How many wait for admission, by the engine's latest word; below 0: slots are free."""

    __slots__ = ("slots", "submitted", "waiting")

    def __init__(self) -> None:
        self.slots = self.submitted = self.waiting = 0

    def update(self, submitted: int, waiting: int, open: int) -> None:
        # `waiting` is a step old, and `open` counts requests rather than choices.
        beyond = open - self.slots
        self.waiting = max(waiting, beyond) if waiting else beyond
        self.submitted = submitted


class _Feed:
    """Step records for one reader, the newest FEED_STEPS of them."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque()
        self._lost = 0
        self._news = asyncio.Event()

    def put(self, record: StepRecord) -> None:
        if len(self._records) >= FEED_STEPS:
            self._records.popleft()
            self._lost += 1
        self._records.append(record)
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def take(self) -> tuple[list[StepRecord], int]:
        """What there is, and how many before it were lost."""
        await self._news.wait()
        self._news.clear()
        taken = list(self._records), self._lost
        self._records.clear()
        self._lost = 0
        return taken
