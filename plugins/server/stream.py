"""Answers that take time: server-sent events with keep-alive comments, and plain calls whose client
may go away meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
LAST_WORD_S = 1.0  # that a client whose time is up has to take the last event

T = TypeVar("T")


class EventStream(Response):
    """`events` as text/event-stream: headers at once, a comment for each `keepalive_s` seconds in
    which no event comes. A client that goes away ends it at once; after `limit_s` seconds (None =
    never) it ends with the event that `on_limit` returns. `close` is called however it ends.
    Errors are events too, which `events` must see to.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        keepalive_s: float,
        close: Callable[[], None],
        limit_s: float | None = None,
        on_limit: Callable[[], bytes] = bytes,
    ) -> None:
        # Proxies such as nginx collect a response's parts unless told not to.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.keepalive_s = keepalive_s
        self.close = close
        self.limit_s = limit_s
        self.on_limit = on_limit
        self._sent = 0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        last = b""
        try:
            await send(start)
            async with asyncio.timeout(self.limit_s):
                await first(self._send_all(send), self._watch(receive, send))
        except ClientDisconnect:
            return
        except TimeoutError:
            last = self.on_limit()
        finally:
            self.close()
        end = {"type": "http.response.body", "body": last, "more_body": False}
        with contextlib.suppress(TimeoutError):  # a reader that has stopped reading
            await asyncio.wait_for(send(end), LAST_WORD_S if last else None)

    async def _send_all(self, send: Send) -> None:
        async for body in self.events:
            self._sending = True
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._sending = False
            self._sent += 1

    async def _watch(self, receive: Receive, send: Send) -> None:
        comment = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            while not gone.done():
                sent = self._sent
                await asyncio.wait({gone}, timeout=self.keepalive_s)
                if sent == self._sent and not self._sending and not gone.done():
                    await send(comment)
        finally:
            gone.cancel()
        raise ClientDisconnect


async def answered(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, cancelled if the client goes away first (ClientDisconnect)."""
    return await first(work, _raise_when_gone(receive))


async def first(work: Coroutine[Any, Any, T], watch: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, or the exception of `watch` if that ends first; both are over then."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _raise_when_gone(receive: Receive) -> None:
    await _until_gone(receive)
    raise ClientDisconnect
