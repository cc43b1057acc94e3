"""What the HTTP code knows of the engine: the contract of a front end's client.

plugins/server/engine_client.py implements it over the channel to the engine's process."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.launch import TokenLogprobs
from core.request import Request
from plugins.server.limits import Limits


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token of a request's choice. finish_reason: the FinishReason's value with the
    last token of its choice, else ""."""

    choice: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's one terminal event. finish_reasons: of each choice, FinishReason values; a
    request that the engine refused has one, "error". error: the message for capacity and error.
    prompt_logprobs: of prompt positions 1 .., if asked for."""

    finish_reasons: tuple[str, ...]
    error: str = ""
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Update:
    """What one step brought a request, or several (`steps`) if its reader lagged. Tokens of a
    choice are in order."""

    tokens: list[Token]
    ended: Ended | None = None
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while the server runs. tokenizer: of transformers, None without one.
    policy: the run's flat label. hooks: hook -> plugin in charge. created: Unix time, s."""

    model: str
    vocab_size: int
    max_model_len: int
    pool_tokens: int
    tokenizer: Any | None
    policy: str
    hooks: dict[str, str]
    created: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class State:
    """The engine's latest report. reason: why it is not ready. age_s: since the report.

    draining: SIGTERM came. waiting, running: token streams; requests: not ended, of all front ends.
    pool: page_size and pages (total, free, tree, evictable, request). steps: since the start.
    totals: counters since the start: prefill_tokens, decode_tokens, sampled_tokens,
    recomputed_tokens, cached_tokens, preemptions, pages_evicted, steps, and finished_<reason>.
    last_steps: records of the last few, as JSON-ready dicts. workers: facts of each replica, None
    where there is but the engine itself."""

    ready: bool
    reason: str = ""
    age_s: float = 0.0
    draining: bool = False
    waiting: int = 0
    running: int = 0
    requests: int = 0
    pool: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    last_steps: list[dict[str, Any]] = field(default_factory=list)
    workers: list[dict[str, Any]] | None = None


class Busy(Exception):  # noqa: N818 - the queue, not the program, is at fault
    """The queue is full: come again later. retry_after_s: when."""

    def __init__(self, waiting: int, limit: int, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{waiting} requests wait, server.max_queue is {limit}")
        self.retry_after_s = retry_after_s


class Unavailable(Exception):  # noqa: N818
    """Nothing new is served: draining, the engine stopped or is stuck, or no replica is there.
    retry_after_s: when to come again, None = not known."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Stream(Protocol):
    """The updates of one request, coalesced where they pile up; ends after the one with `ended`."""

    def __aiter__(self) -> "Stream":
        """Itself."""

    async def __anext__(self) -> Update:
        """The next update."""


class Client(Protocol):
    """The engine as a front end sees it."""

    facts: Facts

    def submit(self, request: Request) -> Stream:
        """Hand a request to the engine; never blocks. Its `arrival_s` is set on the way, and
        `deadline_s` counts from now. Raises Busy or Unavailable."""

    def abort(self, request_id: str) -> None:
        """End a request within a step. Unknown and ended ids are ignored."""

    def drain(self, worker: str, on: bool) -> None:
        """Send a replica nothing more, so that it ends what it has; off: send to it again."""

    def state(self) -> State:
        """The latest report."""

    def steps(self) -> AsyncIterator[dict[str, Any]]:
        """Step records as JSON-ready dicts, from now on. A slow reader loses old ones: the next one
        then has their number as `lost`."""
