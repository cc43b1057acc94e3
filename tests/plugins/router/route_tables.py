"""Queries, snapshots and routers made by hand, for the tests of routing."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.hooks import Hooks
from core.request import Request, SamplingParams
from plugins.router.least_loaded import LeastLoaded
from plugins.shared.prefix_view import PrefixView
from plugins.shared.replica_registry import Registry
from plugins.shared.router import Router
from plugins.shared.routing import COLUMNS, ReplicaSnapshot, ReplicaTable, RouteQuery, RouteRecord

UNKNOWN = ("step_s", "temperature_c", "memory_share", "utilisation")
IDLE: dict[str, Any] = {"page_size": 16, "pool_pages": 100, "pages_free": 100}


def ask(name: str = "r", prompt: int | Sequence[int] = 100, **facts: Any) -> Request:
    """A request: so many tokens of its own, or these."""
    tokens = np.arange(prompt) if isinstance(prompt, int) else np.asarray(prompt)
    params = SamplingParams(max_tokens=facts.pop("max_tokens", 16))
    return Request(name, tokens.astype(np.int32), params, **facts)


def table(*replicas: dict[str, Any]) -> ReplicaTable:
    """Replicas a, b, ... with these figures; what is not given is that of an idle one."""
    unknown = dict.fromkeys(UNKNOWN, np.nan)
    rows = [dict.fromkeys(COLUMNS, 0) | unknown | IDLE | one for one in replicas]
    columns = {name: np.array([row[name] for row in rows], COLUMNS[name]) for name in COLUMNS}
    return ReplicaTable(tuple("abcdefgh"[: len(rows)]), columns)


def query(
    *replicas: dict[str, Any],
    cached: Sequence[int] | None = None,
    computed: Sequence[int] | None = None,
    starts: Sequence[float] = (),
    prompt: int = 100,
    output: float = 28.0,
    now_s: float = 0.0,
    seed: int = 0,
) -> RouteQuery:
    """What a policy is asked: cached tokens of each replica, 0 if not given, all of them computed
    if not said otherwise."""
    held = np.array([0] * len(replicas) if cached is None else cached, np.int64)
    there = held if computed is None else np.array(computed, np.int64)
    facts = ask(prompt=prompt), output, table(*replicas), lambda: held, lambda: there
    random = np.random.default_rng(seed)
    return RouteQuery(*facts, random, now_s, lambda: np.array(starts))


def snapshot(replica: str = "a", number: int = 1, received: int = 0, **facts: Any) -> Any:
    """A report of an idle replica but for `facts`."""
    figures = {"pages_evictable": 0, "pages_promised": 0, "running": 0, "waiting": 0}
    figures |= {"prompt_tokens": 0, "kv_tokens": 0, "time_s": 0.0}
    return ReplicaSnapshot(replica, number, received, **(figures | IDLE | facts))


class Rig:
    """A router over replicas that have joined and reported; its decisions are kept."""

    def __init__(
        self,
        plugin: object | None = None,
        replicas: Sequence[ReplicaSnapshot] = (),
        block_tokens: int = 16,
        **silence: float,
    ) -> None:
        self.records: list[RouteRecord] = []
        self.registry = Registry(**silence)
        self.view = PrefixView(block_tokens)
        hooks = Hooks({}, {"router": plugin or LeastLoaded()})
        self.router = Router(hooks, self.registry, self.view, 0, self.records.append)
        self.incarnations: dict[str, int] = {}
        for one in replicas:
            self.join(one)

    def join(self, one: ReplicaSnapshot, now_s: float = 0.0) -> None:
        self.incarnations[one.replica] = self.registry.join(one.replica, now_s)
        self.report(one, now_s)

    def report(self, one: ReplicaSnapshot, now_s: float = 0.0) -> bool:
        return self.router.report(self.incarnations[one.replica], one, now_s)

    def open(self) -> dict[str, int]:
        return {
            one.replica: self.registry.num_open(one.replica) for one, _ in self.registry.listed(0.0)
        }
