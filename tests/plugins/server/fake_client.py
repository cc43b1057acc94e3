"""A client without an engine: scripted tokens, delays and faults, one asyncio task a request."""

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.launch import TokenLogprobs
from core.request import Request
from plugins.server.client import Busy, Ended, Facts, State, Token, Unavailable, Update

SEED = 7
END = 2  # SmolLM2's end token


def likely(request: Request, choice: int) -> list[int]:
    """Token ids that depend on prompt, seed and (unless greedy) choice alone; ASCII of any
    byte-level vocabulary, so that text stays printable."""
    params = request.params
    key = zlib.crc32(request.prompt.tobytes(), params.seed or SEED)
    rng = np.random.default_rng([key, choice if params.temperature else 0])
    return list(map(int, rng.integers(40, 90, params.max_tokens)))


def entry(token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities with the chosen token first; the last of several is masked, -inf."""
    tops = np.array([token_id, *range(60, 60 + count)][:count], np.int32)
    values = np.array([-0.5 - rank for rank in range(count)], np.float32)
    if count > 2:
        values[-1] = -np.inf
    return TokenLogprobs(-0.5, tops, values)


class FakeStream:
    """Coalesces what piles up, as the contract says."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Update] = asyncio.Queue()
        self.over = False

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> Update:
        if self.over:
            raise StopAsyncIteration
        update = await self.queue.get()
        while not self.queue.empty():
            later = self.queue.get_nowait()
            update.tokens += later.tokens
            update.steps += later.steps
            update.ended = later.ended
        self.over = update.ended is not None
        return update


@dataclass
class FakeClient:
    """script: (request, choice) -> its token ids. delay_s: before the first token; step_s: between
    tokens. held_at: no request gets a token beyond so many until there are `opens_at` requests at
    once, or held_at is None again. error: ends every request after `error_after` tokens. refuse:
    raised by submit. peak: the most requests at once."""

    facts: Facts
    script: Callable[[Request, int], Sequence[int]] = likely
    delay_s: float = 0.0
    step_s: float = 0.0
    held_at: int | None = None
    opens_at: float = math.inf
    peak: int = 0
    error: str = ""
    error_after: int = 0
    error_reason: str = "error"
    refuse: Busy | Unavailable | None = None
    refuse_after: int = 0
    report: State = field(default_factory=lambda: State(ready=True))
    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    live: dict[str, "asyncio.Task[Ended]"] = field(default_factory=dict)
    feed: list[dict[str, object]] = field(default_factory=list)
    drained: list[tuple[str, bool]] = field(default_factory=list)

    def submit(self, request: Request) -> FakeStream:
        if self.refuse and len(self.submitted) >= self.refuse_after:
            raise self.refuse
        self.submitted.append(request)
        stream = FakeStream()
        task = asyncio.ensure_future(self._tokens(request, stream))
        self.live[request.request_id] = task
        self.peak = max(self.peak, len(self.live))
        task.add_done_callback(lambda _: self._end(request, stream, task))
        return stream

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if task := self.live.get(request_id):
            task.cancel()

    def drain(self, worker: str, on: bool) -> None:
        self.drained.append((worker, on))

    def state(self) -> State:
        return self.report

    async def steps(self) -> AsyncIterator[dict[str, object]]:
        for record in self.feed:
            yield record
        await asyncio.Event().wait()

    def _end(self, request: Request, stream: FakeStream, task: "asyncio.Task[Ended]") -> None:
        del self.live[request.request_id]
        aborted = Ended(("abort",) * request.params.n)
        stream.queue.put_nowait(Update([], aborted if task.cancelled() else task.result()))

    async def _tokens(self, request: Request, stream: FakeStream) -> Ended:
        await asyncio.sleep(self.delay_s)
        params = request.params
        scripts = [self._script(request, choice) for choice in range(params.n)]
        for step in range(max(map(len, scripts))):
            while step == self.held_at and self.peak < self.opens_at:
                await asyncio.sleep(0.002)
            if self.error and step == self.error_after:
                return Ended((self.error_reason,) * params.n, self.error)
            tokens = []
            for choice, ids in enumerate(scripts):
                if step < len(ids):
                    last = "" if step + 1 < len(ids) else self._reason(len(ids), params.max_tokens)
                    scored = None if params.logprobs is None else entry(ids[step], params.logprobs)
                    tokens.append(Token(choice, ids[step], scored, last))
            stream.queue.put_nowait(Update(tokens))
            await asyncio.sleep(self.step_s)
        count = params.prompt_logprobs
        prompt = [] if count is None else [entry(int(t), count) for t in request.prompt[1:]]
        reasons = tuple(self._reason(len(ids), params.max_tokens) for ids in scripts)
        return Ended(reasons, cached_tokens=1, prompt_logprobs=prompt)

    def _script(self, request: Request, choice: int) -> list[int]:
        """The ids as an engine would end them: by max_tokens, or with an end token."""
        ids = list(self.script(request, choice))[: request.params.max_tokens]
        ends = len(ids) == request.params.max_tokens or ids[-1] in request.params.stop_token_ids
        return ids if ends else [*ids, END]

    @staticmethod
    def _reason(length: int, limit: int) -> str:
        return "length" if length == limit else "stop"
