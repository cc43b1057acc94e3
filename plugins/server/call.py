"""One HTTP call on its way through the engine: submitted, followed, aborted if nobody wants it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from core.errors import RequestError
from core.launch import TokenLogprobs
from core.request import FinishReason, Request
from plugins.server.asked import Asked, Prompt
from plugins.server.choice import Choice, Delta
from plugins.server.client import Busy, Client, Ended, Stream, Unavailable, Update
from plugins.server.errors import ApiError, from_request_error, too_busy, unavailable
from plugins.server.metrics import Metrics
from plugins.server.text import ChoiceText
from plugins.shared.tokens import TokenTable

FAILED = {FinishReason.error.value, FinishReason.capacity.value, FinishReason.abort.value}
LEFT = "abort"  # how a request ends in the metrics if nothing else is known


@dataclass(slots=True)
class Counts:
    """Tokens of a call, over all its prompts and choices; a prompt counts once."""

    prompt: int = 0
    output: int = 0
    cached: int = 0


@dataclass(slots=True)
class _Part:
    """One prompt of the call, which is one request of the engine."""

    request: Request
    stream: Stream
    choices: list[Choice]
    cached_tokens: int = 0
    over: bool = False  # `ended` came
    aborted: bool = False

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def cut(self) -> bool:
        return self.finished and any(choice.cut for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)


class Call:
    """`submit`, then iterate `deltas`; `close` in any case. Choice c of prompt p is p * n + c.

    An echo with log-probabilities is known when the request has ended: nothing comes before."""

    def __init__(
        self,
        client: Client,
        asked: Asked,
        table: TokenTable,
        metrics: Metrics,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.asked = asked
        self.outcome = LEFT
        self._client = client
        self._table = table
        self._metrics = metrics
        self._now = now
        self._start_s = now()
        self._first_s: float | None = None
        self._parts: list[_Part] = []
        self._chunks = [0, 0]  # of one step, of several
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return len(self.asked.prompts) * self.asked.n

    @property
    def counts(self) -> Counts:
        """So far; final once `deltas` has ended."""
        return Counts(
            sum(len(part.request.prompt) for part in self._parts),
            sum(part.num_tokens for part in self._parts),
            sum(part.cached_tokens for part in self._parts),
        )

    def submit(self, call_id: str) -> None:
        """Hand all prompts to the engine, or none. Raises ApiError 429 or 503."""
        pairs = zip(self.asked.requests(call_id), self.asked.prompts, strict=True)
        try:
            for index, (request, prompt) in enumerate(pairs):
                choices = self._choices(index, prompt)
                self._parts.append(_Part(request, self._client.submit(request), choices))
        except Busy as error:
            self.close()
            raise too_busy(str(error), error.retry_after_s) from None
        except Unavailable as error:
            self.close()
            raise unavailable(error.reason, error.retry_after_s) from None

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What each step brought; each choice's last delta has its finish_reason. Raises ApiError
        if the engine could not finish one."""
        held = self.asked.echo and self.asked.logprobs is not None
        kept: dict[int, list[Delta]] = {}
        for index, part in enumerate(self._parts if self.asked.echo else ()):
            prompt = part.request.prompt.tolist()
            kept[index] = [choice.echo(prompt) for choice in part.choices]
            if not held:
                yield kept[index]
        async for part, update in self._updates():
            if update.tokens and self._first_s is None:
                self._first_s = self._now()
            deltas = self._take(part, update)
            if held:
                echoed = kept[self._parts.index(part)]
                echoed += deltas
                if update.ended and part.finished:
                    yield [
                        _scored(delta, update.ended.prompt_logprobs) for delta in _joined(echoed)
                    ]
            elif deltas:
                self._chunks[update.steps > 1] += 1
                yield deltas
            if update.ended:
                self._end(part, update.ended)
        self.outcome = "done"

    def close(self) -> None:
        """Abort what still runs, and count the call. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for part in self._parts:
            if not part.over and not part.aborted:
                self._client.abort(part.request.request_id)
        self._count()

    async def _updates(self) -> AsyncIterator[tuple[_Part, Update]]:
        if len(self._parts) == 1:
            (part,) = self._parts
            async for update in part.stream:
                yield part, update
            return
        queue: asyncio.Queue[tuple[_Part, Update]] = asyncio.Queue(maxsize=len(self._parts))
        self._tasks = [asyncio.ensure_future(_forward(part, queue)) for part in self._parts]
        open_parts = len(self._parts)
        while open_parts:
            part, update = await queue.get()
            yield part, update
            open_parts -= update.ended is not None

    def _take(self, part: _Part, update: Update) -> list[Delta]:
        deltas: list[Delta] = []
        for token in update.tokens:
            choice = part.choices[token.choice]
            if choice.finish_reason is None:
                deltas.append(choice.take(token))
        if len(deltas) == 1 and deltas[0].finish_reason is None and update.ended is None:
            return [] if deltas[0].empty else deltas  # nearly all updates
        if update.ended:
            part.over = True
            part.cached_tokens = update.ended.cached_tokens
            for choice, reason in zip(part.choices, update.ended.finish_reasons, strict=False):
                if choice.finish_reason is None and reason not in FAILED:
                    deltas.append(choice.finish(reason))
        elif part.cut and not part.aborted:
            part.aborted = True
            self._client.abort(part.request.request_id)
        if len(update.tokens) > 1:
            deltas = _joined(deltas)
        return [delta for delta in deltas if not delta.empty]

    def _end(self, part: _Part, ended: Ended) -> None:
        if part.finished:
            return
        reason = next((reason for reason in ended.finish_reasons if reason in FAILED), "error")
        self.outcome = reason
        raise failure(reason, ended.error)

    def _choices(self, prompt_index: int, prompt: Prompt) -> list[Choice]:
        asked = self.asked
        before = () if asked.echo else prompt.ids.tolist()
        logprobs = asked.logprobs is not None
        choices = []
        for choice in range(asked.n):
            text = ChoiceText(
                self._table,
                asked.stop,
                include_stop=asked.include_stop,
                skip_special_tokens=asked.skip_special_tokens,
                prompt_ids=before,
                min_tokens=prompt.params.min_tokens,
                logprobs=logprobs,
            )
            index = prompt_index * asked.n + choice
            choices.append(Choice(index, text, self._table, logprobs, not asked.include_stop))
        return choices

    def _count(self) -> None:
        for part in self._parts:
            reason = part.choices[0].finish_reason if part.finished else None
            self._metrics.ended(
                reason or self.outcome,
                len(part.request.prompt),
                part.cached_tokens,
                part.num_tokens,
            )
        self._metrics.chunks(*self._chunks)
        if self._first_s is not None:
            longest = max(choice.num_tokens for part in self._parts for choice in part.choices)
            e2e_s = self._now() - self._start_s
            self._metrics.latencies(self._first_s - self._start_s, e2e_s, longest - 1)


def failure(reason: str, message: str) -> ApiError:
    """The error for a request that the engine could not finish. reason: FinishReason's value."""
    refused = from_request_error(RequestError(message))
    if refused.param is not None:  # a message of the core's checks begins with the field
        return refused
    if reason == FinishReason.abort.value:
        return unavailable(message or "the server ended the request")
    code = "no_capacity" if reason == FinishReason.capacity.value else "engine_error"
    status = 503 if reason == FinishReason.capacity.value else 500
    return ApiError(status, message or "the engine failed", type="server_error", code=code)


def _joined(deltas: list[Delta]) -> list[Delta]:
    """One delta a choice, in order of the first."""
    if len(deltas) == 1:
        return deltas
    joined: dict[int, Delta] = {}
    for delta in deltas:
        if delta.index in joined:
            joined[delta.index].add(delta)
        else:
            joined[delta.index] = delta
    return list(joined.values())


def _scored(delta: Delta, prompt_logprobs: list[TokenLogprobs]) -> Delta:
    """The delta of an echo, whose prompt's log-probabilities have come; its first has none."""
    for index, logprobs in enumerate(prompt_logprobs, start=1):
        delta.scored[index] = replace(delta.scored[index], logprobs=logprobs)
    return delta


async def _forward(part: _Part, queue: "asyncio.Queue[tuple[_Part, Update]]") -> None:
    async for update in part.stream:
        await queue.put((part, update))
