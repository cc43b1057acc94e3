"""The contract of routing: what replicas report, what a router's policy is asked and answers.

A replica sends numbered snapshots of its engine. The registry
(plugins/shared/replica_registry.py) keeps the newest of each and corrects it by what it sent since;
the router (plugins/shared/router.py) asks `decide_route`, checks the answer and counts it, all in
one. Policies are in plugins/router/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.request import Request


class ReplicaState(Enum):
    """Where a replica stands; requests go to `ready` ones alone.

    joining: known, without a report yet. draining: ends what it has. suspect: silent for longer
    than a beat or two; it is ready again with its next sign of life. dead: silent for too long, or
    known to be gone; it may join again, as another incarnation."""

    joining = "joining"
    ready = "ready"
    draining = "draining"
    suspect = "suspect"
    dead = "dead"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself; None = it does not say, which is never the same as 0.

    temperature_c: degrees Celsius. memory_used_bytes, memory_bytes: of the whole device.
    utilisation: in [0, 1]."""

    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    utilisation: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaSnapshot:
    """A replica's report, made between two steps (plugins/shared/replica_report.py).

    number: counts an incarnation's reports from 1; one that is not newer than the last is dropped.
    received: the highest number of the tickets that had arrived (Ticket.number), 0 = none: what was
    sent after it is not in these figures yet. time_s: by the replica's own clock; to tell, not to
    compare. foreign: of running + waiting, those that came by another way than this router.

    pages_promised: pages that running requests will still take to their expected ends, and waiting
    ones from the start, prefixes in the cache not counted off. prompt_tokens: known tokens without
    KV, of all of its requests: prefill work left. kv_tokens: tokens with KV, of running requests.
    step_s: the mean of the last steps, None = there were none. cache: digests of the prefixes in
    its cache (plugins/shared/prefix_view.py), None = not told."""

    replica: str
    number: int
    received: int
    time_s: float
    page_size: int
    pool_pages: int
    pages_free: int
    pages_evictable: int
    pages_promised: int
    running: int
    waiting: int
    prompt_tokens: int
    kv_tokens: int
    foreign: int = 0
    step_s: float | None = None
    cache: NDArray[np.uint64] | None = None
    device: DeviceFacts = field(default_factory=DeviceFacts)


COLUMNS: dict[str, type[np.generic]] = {
    "requests": np.int64,  # not ended: sent to it, or counted by it and of another way
    "running": np.int64,  # as reported
    "waiting": np.int64,  # as reported
    "page_size": np.int64,
    "pool_pages": np.int64,
    "pages_free": np.int64,  # as reported
    "pages_evictable": np.int64,  # as reported
    "pages_promised": np.int64,  # reported, and those of what was sent since
    "prompt_tokens": np.int64,  # reported, and those of what was sent since, its cached ones not
    "kv_tokens": np.int64,  # reported, and the prompts of what was sent since
    "step_s": np.float64,  # NaN = unknown, here and below
    "temperature_c": np.float64,
    "memory_share": np.float64,  # used / all, of the device
    "utilisation": np.float64,
    "age_s": np.float64,  # since the report arrived
}


class ReplicaTable:
    """The replicas that may be chosen, in the order in which they joined: COLUMNS as read-only
    attributes, one numpy array each. ids: their names."""

    def __init__(self, ids: tuple[str, ...], columns: Mapping[str, NDArray[Any]]) -> None:
        self.ids = ids
        for name, dtype in COLUMNS.items():
            column = np.asarray(columns[name], dtype)
            column.flags.writeable = False
            setattr(self, name, column)

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Only asked for what is no column."""
        raise AttributeError(f"no fact {name!r}; there are ids, {', '.join(COLUMNS)}")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class RouteQuery:
    """Where shall `request` go? replicas: at least one.

    predicted_output: tokens, the length predictor's answer within max_tokens. cached_tokens():
    tokens of the prompt that each replica probably holds or is computing, int64 [replicas], at most
    all but the last; computed_tokens(): of these the ones that it surely has computed, likewise:
    those that requests which have ended brought there, or as many as are more than all the prefill
    work that it has left. Both are worked out on the first call. random: a generator of the
    router's own, seeded by the run's seed. earliest_starts(): when each replica would truly start
    to answer, seconds from now, float64 [replicas]; raises PolicyError unless in a simulation, and
    for a plugin with a true attribute `oracle`."""

    request: Request
    predicted_output: float
    replicas: ReplicaTable
    cached_tokens: Callable[[], NDArray[np.int64]]
    computed_tokens: Callable[[], NDArray[np.int64]]
    random: np.random.Generator
    now_s: float
    earliest_starts: Callable[[], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class RouteDecision:
    """replica: one of query.replicas.ids. scores: what the policy compared, a finite number for
    each of them in order; None = it compared nothing. reason: short, for the record."""

    replica: str
    scores: NDArray[np.float64] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request on its way: what was counted for it, to be given back once.

    number: counts what this incarnation of the replica was sent, from 1; it goes with the request,
    and comes back in ReplicaSnapshot.received. pages, prompt_tokens: what it will probably take,
    beyond the cached_tokens that are probably there."""

    number: int
    request_id: str
    replica: str
    incarnation: int
    sent_s: float
    pages: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """A decision, for the records. scores: by replica; cached_tokens: of the chosen one, as the
    router thinks; age_s: of its report."""

    time_s: float
    request_id: str
    replica: str
    plugin: str
    reason: str
    scores: dict[str, float]
    cached_tokens: int
    age_s: float


def pages_needed(query: RouteQuery) -> NDArray[np.int64]:
    """Pages that each replica would need for the request to its expected end, int64 [replicas],
    with nothing cached."""
    tokens = len(query.request.prompt) + query.request.params.n * query.predicted_output
    pages: NDArray[np.int64] = np.ceil(tokens / query.replicas.page_size).astype(np.int64)
    return pages
