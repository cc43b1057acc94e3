"""What crosses between the router and a replica, pickled.

The router numbers token streams: a request with n choices has the keys key .. key + n - 1 on the
replica that it is sent to, never used again, on another one neither. So news of a request that has
moved meanwhile names keys that nobody knows."""

from dataclasses import dataclass, field
from typing import Any

from core.launch import TokenLogprobs
from core.records import StepRecord
from core.request import Request
from plugins.shared.routing import ReplicaSnapshot


@dataclass(frozen=True, slots=True)
class Ask:
    """Serve this request. ticket: Ticket.number."""

    key: int
    ticket: int
    request: Request


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody wants this request any more."""

    key: int


Order = Ask | Drop


@dataclass(frozen=True, slots=True)
class Orders:
    """A batch. sent_s: time.perf_counter() of the router, whose times the requests have; another
    machine moves them by the difference to its own when they come in."""

    sent_s: float
    orders: list[Order]


@dataclass(frozen=True, slots=True)
class End:
    """A request's one terminal event. key: of its first choice. finish_reasons: of each choice;
    those that did not run here have the request's own. The rest as in RequestRecord."""

    key: int
    finish_reason: str
    finish_reasons: tuple[str, ...] = ()
    error: str = ""
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class News:
    """What a step brought, or a report. tokens[i] is for keys[i]; finish_reasons and logprobs by i.
    record: of the step. state: as mode serve describes its engine (plugins/mode/serve_loop.py),
    with the snapshot for the registry. fault: why the engine broke; nothing follows."""

    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    ended: list[End] = field(default_factory=list)
    record: StepRecord | None = None
    state: dict[str, Any] | None = None
    snapshot: ReplicaSnapshot | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Born:
    """An incarnation of a replica that is ready. birth: tells it from others of the same replica.
    executor: what Executor.describe says."""

    birth: str
    process_id: int
    host: str
    executor: dict[str, Any]
