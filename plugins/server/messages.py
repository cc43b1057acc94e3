"""What crosses between the engine's process and the front ends, pickled.

A front end numbers the token streams that it asks for: a request with n choices has the keys
key .. key + n - 1, never used again. Steps name them by key, in lists of plain numbers, since these
are what pickles fastest."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from core.launch import TokenLogprobs
from core.records import Choice, StepRecord
from core.request import Request
from plugins.server.client import Ended


@dataclass(frozen=True, slots=True)
class Hello:
    """A front end is connected."""


@dataclass(frozen=True, slots=True)
class Submit:
    """sent_s: time.perf_counter(), which processes of one machine share. The request's deadline_s
    counts from then."""

    key: int
    sent_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The client went away, or has all that it wants."""

    key: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Send step records from now on, or no more."""

    on: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Send a replica nothing more, or again."""

    worker: str
    on: bool


@dataclass(frozen=True, slots=True)
class Received:
    """Messages that the front end has taken in so far."""

    count: int


@dataclass(slots=True)
class StepNews:
    """What a step brought one front end. tokens[i] is for keys[i]; finish_reasons and logprobs by
    i. ended: key of a request, and how it ended. submitted: requests received from this front end
    so far; open: requests of all front ends; waiting: token streams not admitted. record: for who
    watches."""

    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    ended: list[tuple[int, Ended]] = field(default_factory=list)
    submitted: int = 0
    open: int = 0
    waiting: int = 0
    record: StepRecord | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The engine's state as mode serve describes it (plugins/mode/serve_loop.py): ready, reason,
    waiting, running, requests, slots, pool, totals, and idle_s: how long work has been pending
    without progress; with last_steps, a list of StepRecord; with replicas, workers and
    retry_after_s. submitted, open: see StepNews."""

    state: dict[str, Any]
    draining: bool
    submitted: int
    open: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Nothing follows. reason: why, for streams that are open still."""

    reason: str


FromFront = Hello | Submit | Abort | Watch | Drain | Received
FromEngine = StepNews | Report | Goodbye

_STEP_FIELDS = tuple(field.name for field in fields(StepRecord))
_CHOICE_FIELDS = tuple(field.name for field in fields(Choice))


def step_facts(record: StepRecord) -> dict[str, Any]:
    """A step record as a dict that json.dumps takes."""
    facts = {name: getattr(record, name) for name in _STEP_FIELDS}
    facts["choices"] = [
        {name: getattr(choice, name) for name in _CHOICE_FIELDS} for choice in record.choices
    ]
    plain: dict[str, Any] = _plain(facts)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
