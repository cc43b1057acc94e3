"""The client of mode load: calls of OpenAI's API whose answers are read as they come."""

import json
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import aiohttp

from core.clock import Clock
from core.errors import ConfigError
from plugins.mode.load_answer import Answer

SETUP_S = 30.0  # for questions before the run
KEEP_ALIVE_S = 2.0  # less than servers hold idle connections, or one closes as it is used again
SHOWN_CHARS = 300  # of an error's text
PREFIX = b"data:"


class LoadClient:
    """Use as an async context manager. url: of the API, with /v1. max_connections: None = no limit.
    timeout_s: of one call."""

    def __init__(
        self, url: str, api_key: str | None, max_connections: int | None, timeout_s: float
    ) -> None:
        self._url = url
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._max_connections = max_connections
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            limit=self._max_connections or 0, keepalive_timeout=KEEP_ALIVE_S
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """The JSON that a path answers; None for one the server does not know. Raises ConfigError
        if there is no such server, or it does not answer so."""
        place = f"{self._url}/{path}"
        timeout = aiohttp.ClientTimeout(total=SETUP_S)
        try:
            async with self._session.get(place, timeout=timeout) as response:
                if response.status in (404, 405):
                    return None
                if response.status != 200:
                    raise ConfigError(f"{place} answers {response.status}: {await _text(response)}")
                return json.loads(await response.read())
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConfigError(
                f"mode.url must be that of a server that answers: {place}: {_described(error)}"
            ) from error

    async def ask(
        self, path: str, body: bytes, answer: Answer, clock: Clock, heard: Callable[[], None]
    ) -> None:
        """Post `body` and read to the end of `answer`. Raises nothing that a server can cause: that
        is in the answer. heard: called for each event."""
        try:
            async with self._session.post(f"{self._url}/{path}", data=body) as response:
                if response.status != 200:
                    text = await _text(response)
                    answer.fail(f"http_{response.status}", f"{response.status}: {text}")
                elif response.content_type != "text/event-stream":
                    kind = response.content_type
                    answer.fail("no_stream", f"the answer is no text/event-stream but {kind}")
                else:
                    await _read(response, answer, clock, heard)
        except TimeoutError:
            answer.fail("timeout", f"no end within mode.timeout_s = {self._timeout_s:g} s")
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            answer.fail("no_connection", _described(error))
        except (aiohttp.ClientError, OSError) as error:
            answer.fail("disconnected", _described(error))
        answer.ended_s = clock.now()


async def _read(
    response: aiohttp.ClientResponse, answer: Answer, clock: Clock, heard: Callable[[], None]
) -> None:
    """Take events until the body ends; all that one read brought have its time."""
    rest = b""
    async for piece in response.content.iter_any():
        now_s = clock.now()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(PREFIX):
                continue  # a blank line or a comment
            data = line[len(PREFIX) :].strip()
            if data == b"[DONE]":
                continue
            try:
                answer.take(json.loads(data.decode()), now_s)
            except (AttributeError, KeyError, TypeError, ValueError):
                shown = data[:SHOWN_CHARS].decode(errors="replace")
                answer.fail("bad_event", f"an event is not as OpenAI's API has them: {shown}")
                return
            heard()


async def _text(response: aiohttp.ClientResponse) -> str:
    """The message of an error, or the beginning of whatever the body is."""
    text = (await response.read()).decode(errors="replace")
    with suppress(KeyError, TypeError, ValueError):
        text = str(json.loads(text)["error"]["message"])
    return text[:SHOWN_CHARS]


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
