"""The two endpoints that generate: from a body to an answer, whole or as a stream."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from plugins.server.asked import Asked, ask_chat, ask_completion
from plugins.server.body import read_body
from plugins.server.call import Call
from plugins.server.chat import Chat
from plugins.server.choice import Delta
from plugins.server.chunks import Format, Writer, compact
from plugins.server.client import Client, Facts
from plugins.server.completions import Completions
from plugins.server.errors import ApiError
from plugins.server.id_text import IdTable
from plugins.server.metrics import Metrics
from plugins.server.responses import json_response
from plugins.server.schema import Body, ChatBody, CompletionBody, parse
from plugins.server.settings import Settings
from plugins.server.stream import DONE, EventStream, answered
from plugins.shared.tokens import TokenTable

LONG_BODY_BYTES = 1 << 14  # tokenising more than this takes milliseconds: a thread does it

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What tells the two apart."""

    prefix: str  # of ids
    body: type[Any]
    ask: Callable[[Any, Facts], Asked]
    format: Format


COMPLETIONS = Endpoint("cmpl-", CompletionBody, ask_completion, Completions())
CHAT = Endpoint("chatcmpl-", ChatBody, ask_chat, Chat())


class Generation:
    """now: Unix time, for `created`."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        metrics: Metrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        tokenizer = client.facts.tokenizer
        self._table = IdTable() if tokenizer is None else TokenTable(tokenizer)
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._now = now

    async def completions(self, request: Request) -> Response:
        """Continue a text, or several, given as text or token ids."""
        return await self._answer(request, COMPLETIONS)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._answer(request, CHAT)

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        facts = self._client.facts
        asked = await parsed(
            request, self._settings, endpoint.body, lambda body: endpoint.ask(body, facts)
        )
        call_id = endpoint.prefix + uuid.uuid4().hex
        created, form = int(self._now()), endpoint.format
        writer = Writer(form, call_id, created, facts.model, self._table, asked.usage)
        call = Call(self._client, asked, self._table, self._metrics)
        call.submit(call_id)
        limit_s = self._settings.request_timeout_s
        if asked.stream:
            return EventStream(
                _events(call, writer),
                self._settings.keepalive_s,
                call.close,
                limit_s,
                lambda: _timed_out(call, limit_s),
            )
        try:
            async with asyncio.timeout(limit_s):
                answers = await answered(_collect(call), request.receive)
        except TimeoutError:
            call.outcome = "timeout"
            raise timeout_error(limit_s) from None
        finally:
            call.close()
        return json_response(writer.body(answers, call.counts))


async def parsed(
    request: Request, settings: Settings, model: type[Body], use: Callable[[Body], T]
) -> T:
    """`use` of the request's body; long bodies are handled in a thread. Raises ApiError."""
    raw = await read_body(request, settings.max_body_bytes)
    if len(raw) <= LONG_BODY_BYTES:
        return use(parse(model, raw))
    return await asyncio.to_thread(lambda: use(parse(model, raw)))


def timeout_error(limit_s: float) -> ApiError:
    """For a request that took too long."""
    message = f"the request took longer than server.request_timeout_s = {limit_s:g} s"
    return ApiError(408, message, type="server_error", code="request_timeout")


async def _collect(call: Call) -> list[Delta]:
    answers = [Delta(index) for index in range(call.num_choices)]
    async for deltas in call.deltas():
        for delta in deltas:
            answers[delta.index].add(delta)
    return answers


async def _events(call: Call, writer: Writer) -> AsyncIterator[bytes]:
    if opening := writer.opening(call.num_choices):
        yield opening
    try:
        async for deltas in call.deltas():
            if len(deltas) == 1:
                yield writer.chunk(deltas[0])
            else:
                yield b"".join(map(writer.chunk, deltas))
    except ApiError as error:
        yield _error_event(error)  # and no [DONE]: the answer is not whole
        return
    yield writer.usage(call.counts) + DONE if call.asked.usage else DONE


def _timed_out(call: Call, limit_s: float) -> bytes:
    call.outcome = "timeout"
    return _error_event(timeout_error(limit_s))


def _error_event(error: ApiError) -> bytes:
    return f"data: {compact(error.body())}\n\n".encode()
