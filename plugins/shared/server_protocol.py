"""Interface of a server: between mode serve and the plugin behind `build_server`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.queries import StepEvent
from core.records import RequestRecord
from core.request import Request


@dataclass(frozen=True, slots=True)
class ServerQuery:
    """facts: what clients may ask about: model, tokenizer, vocab_size, max_model_len, pool_tokens,
    policy, hooks. folder: of the run, absolute."""

    facts: dict[str, Any]
    folder: str


@dataclass(frozen=True, slots=True)
class Steer:
    """Send a replica nothing more, so that it ends what it has, or send to it again."""

    replica: str
    draining: bool


class Server(Protocol):
    """The clients of a serving engine. Called from the engine's thread alone; nothing here waits
    for a client."""

    draining: bool
    """It is to end: nothing new comes in, and what runs may finish."""

    def watch(self, descriptor: int) -> None:
        """Let `poll` return early when this file descriptor is readable, too."""

    def poll(self, timeout_s: float) -> Sequence[Request | str | Steer]:
        """What came in: requests, their times those of time.perf_counter, ids to abort, and what
        concerns replicas: none of that unless the reports tell of `workers`. Waits up to timeout_s
        for the first."""

    def refuse(self, request_id: str, error: str) -> None:
        """The engine did not take this request."""

    def publish(self, event: StepEvent, records: Mapping[str, RequestRecord]) -> None:
        """A step's tokens and ended requests; records: of every request in the event."""

    def report(self, state: dict[str, Any]) -> None:
        """How the engine is: JSON values. That it comes at all says that the loop is alive. With
        replicas it holds `workers`, a list of their facts, and retry_after_s while it is not ready:
        when a client may come again, None = not known."""

    def close(self) -> None:
        """End the front ends."""
