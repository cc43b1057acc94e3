"""The router: asks `decide_route`, checks the answer and counts it, all under one lock.

Two requests that come at the same time therefore never see the same figures, however old the
replicas' reports are. It keeps what its policies are told: the registry's figures, and its own view
of the replicas' prefix caches.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import PolicyError, TritiumError
from core.hooks import Hooks
from core.request import Request
from plugins.shared.prefix_view import PrefixView
from plugins.shared.replica_registry import Registry
from plugins.shared.routing import (
    ReplicaSnapshot,
    ReplicaTable,
    RouteDecision,
    RouteQuery,
    RouteRecord,
    Ticket,
    pages_needed,
)

HOOK = "decide_route"
STREAM = 0x726F757465  # "route": keeps the router's draws apart from others of the run's seed


class NoReplicaError(TritiumError):
    """No replica takes requests now; one may later."""


@dataclass
class RouterSettings:
    """snapshot_interval_s: how often a replica reports. snapshot_delay_s: how long a report is on
    its way, in simulation. suspect_after_s, dead_after_s: silence after which a replica gets
    nothing more, and is given up. block_tokens: of the router's view of prefix caches."""

    snapshot_interval_s: float = 0.25
    snapshot_delay_s: float = 0.005
    suspect_after_s: float = 3.0
    dead_after_s: float = 10.0
    block_tokens: int = 64

    def __post_init__(self) -> None:
        interval = self.snapshot_interval_s
        require(interval > 0, "router.snapshot_interval_s", "> 0", interval)
        delay = self.snapshot_delay_s
        require(delay >= 0, "router.snapshot_delay_s", ">= 0", delay)
        Registry(self.suspect_after_s, self.dead_after_s)
        PrefixView(self.block_tokens)


class Router:
    """Chooses replicas by the plugin in charge of `decide_route`.

    on_route: told of every decision. starts: for simulations alone, when each replica of a table
    would truly start a request; only a plugin with a true attribute `oracle` is told."""

    def __init__(
        self,
        hooks: Hooks,
        registry: Registry,
        view: PrefixView,
        seed: int,
        on_route: Callable[[RouteRecord], None] | None = None,
        starts: Callable[[Request, ReplicaTable], NDArray[np.float64]] | None = None,
    ) -> None:
        self.hooks = hooks
        self.registry = registry
        self.view = view
        self._random = np.random.default_rng((seed, STREAM))
        self._on_route = on_route
        plugin = hooks.registered.get(hooks.in_charge().get(HOOK, ""))
        oracle = plugin is not None and bool(getattr(plugin.plugin, "oracle", False))
        self._starts = starts if oracle else None
        self._new: dict[tuple[int, int], list[int]] = {}  # what open tickets added to the view
        self._coming: dict[int, set[int]] = {}  # likewise, of each incarnation
        self._viewed: dict[str, int] = {}  # the incarnations that the view is of

    def route(
        self,
        request: Request,
        predicted_output: float,
        now_s: float,
        excluded: Collection[str] = (),
    ) -> Ticket:
        """Choose a replica and count the request there. excluded: not these. Raises NoReplicaError
        if none is ready, PolicyError for an answer that breaks a rule."""
        with self.registry.lock:
            table = self.registry.table(now_s, excluded)
            if not len(table):
                raise NoReplicaError("no replica is ready")
            page_size = int(table.page_size[0])
            digests = self.view.digests(request, page_size)
            cached = cache(partial(self._cached, digests, table, page_size))
            shown = replace(request, forced_output=None) if request.forced_output else request
            computed = cache(partial(self._computed, digests, table, page_size, cached))
            starts = partial(self._earliest, request, table)
            facts = shown, predicted_output, table, cached, computed
            query = RouteQuery(*facts, self._random, now_s, starts)
            decision, plugin = self.hooks.decide(HOOK, query)
            row = check_route(decision, plugin, table)
            ticket = self._count(query, decision.replica, int(cached()[row]), row)
            new = self.view.add(decision.replica, digests)
            self._new[ticket.incarnation, ticket.number] = new
            self._coming.setdefault(ticket.incarnation, set()).update(new)
            if self._on_route is not None:
                self._on_route(_record(query, decision, plugin, row, ticket))
            return ticket

    def ended(self, ticket: Ticket) -> bool:
        """The request is over there, served or aborted; whether the ticket was open."""
        with self.registry.lock:
            self._take_new(ticket)
            return self.registry.close(ticket)

    def refused(self, ticket: Ticket) -> bool:
        """The replica never took it: it computed nothing of it either."""
        with self.registry.lock:
            new = self._take_new(ticket)
            if self._viewed.get(ticket.replica) == ticket.incarnation:
                self.view.forget(ticket.replica, new)
            return self.registry.close(ticket)

    def report(self, incarnation: int, snapshot: ReplicaSnapshot, now_s: float) -> bool:
        """A replica's report; whether it was news."""
        with self.registry.lock:
            news = self.registry.report(incarnation, snapshot, now_s)
            if news:
                name, page_size = snapshot.replica, snapshot.page_size
                if self._viewed.get(name) != incarnation:  # whatever became of the last one
                    self.view.drop(name)
                    self._viewed[name] = incarnation
                self.view.resize(name, snapshot.pool_pages * page_size, page_size)
                if snapshot.cache is not None:
                    held = snapshot.cache.tolist()
                    self.view.replace(name, held)
                    self._coming.get(incarnation, set()).difference_update(held)
            return news

    def fail(self, incarnation: int, replica: str, why: str) -> list[Ticket]:
        """A replica is gone with its cache; returns what it leaves undone."""
        with self.registry.lock:
            left = self.registry.fail(incarnation, why)
            self.view.drop(replica)
            return left

    def _cached(self, digests: list[int], table: ReplicaTable, page_size: int) -> NDArray[np.int64]:
        tokens = self.view.cached_tokens(digests, table.ids, page_size)
        tokens.flags.writeable = False
        return tokens

    def _earliest(self, request: Request, table: ReplicaTable) -> NDArray[np.float64]:
        if self._starts is None:
            plugin = self.hooks.in_charge()[HOOK]
            rule = "asked in mode=simulate by a plugin with a true attribute `oracle`"
            raise PolicyError(f"{HOOK}: query.earliest_starts() must be {rule}, got {plugin}")
        return self._starts(request, table)

    def _computed(
        self,
        digests: list[int],
        table: ReplicaTable,
        page_size: int,
        cached: Callable[[], NDArray[np.int64]],
    ) -> NDArray[np.int64]:
        size = self.view.block_size(page_size)
        tokens: NDArray[np.int64] = np.maximum(cached() - table.prompt_tokens, 0)
        for row in np.flatnonzero(tokens < cached()).tolist():
            depth = int(cached()[row]) // size
            coming = self._coming.get(self._viewed.get(table.ids[row], 0), ())
            while depth and digests[depth - 1] in coming:
                depth -= 1
            tokens[row] = max(tokens[row], depth * size)
        tokens.flags.writeable = False
        return tokens

    def _take_new(self, ticket: Ticket) -> list[int]:
        """What the ticket added to the view is no longer on its way."""
        new = self._new.pop((ticket.incarnation, ticket.number), [])
        coming = self._coming.get(ticket.incarnation, set())
        coming.difference_update(new)
        if not coming:
            self._coming.pop(ticket.incarnation, None)
        return new

    def _count(self, query: RouteQuery, replica: str, cached: int, row: int) -> Ticket:
        request = query.request
        pages = int(pages_needed(query)[row]) - cached // int(query.replicas.page_size[row])
        prompt = len(request.prompt) - cached
        return self.registry.write(replica, request.request_id, query.now_s, pages, prompt, cached)


def check_route(decision: RouteDecision, plugin: str, table: ReplicaTable) -> int:
    """The row of the chosen replica. Raises PolicyError for what is no decision, an unknown replica
    or bad scores."""
    where = f"{HOOK} of {plugin}"
    if not isinstance(decision, RouteDecision):
        raise PolicyError(f"{where}: the answer must be a RouteDecision, got {decision!r}")
    if decision.replica not in table.ids:
        names = ", ".join(table.ids)
        raise PolicyError(
            f"{where}: replica must be one that is ready ({names}), got {decision.replica!r}"
        )
    if decision.scores is not None:
        scores = np.asarray(decision.scores)
        if scores.shape != (len(table),) or not np.isfinite(scores).all():
            rule = f"one finite number for each of {len(table)} replicas"
            raise PolicyError(f"{where}: scores must hold {rule}, got {decision.scores!r}")
    return table.ids.index(decision.replica)


def _record(
    query: RouteQuery, decision: RouteDecision, plugin: str, row: int, ticket: Ticket
) -> RouteRecord:
    scores = [] if decision.scores is None else decision.scores.tolist()
    return RouteRecord(
        time_s=query.now_s,
        request_id=ticket.request_id,
        replica=decision.replica,
        plugin=plugin,
        reason=decision.reason,
        scores=dict(zip(query.replicas.ids, scores, strict=False)),
        cached_tokens=ticket.cached_tokens,
        age_s=float(query.replicas.age_s[row]),
    )
