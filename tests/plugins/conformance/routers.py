"""Routers, held to their contract (plugins/shared/routing.py) by a router that nothing stands
behind: replicas that come, go, grow hot and report late; requests that share beginnings, end, are
refused. What a simulation of engines adds is in tests/plugins/mode/test_simulate_replicas.py."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from core.errors import PolicyError
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.request import Request, SamplingParams
from plugins.shared.prefix_view import PrefixView
from plugins.shared.replica_registry import Registry
from plugins.shared.router import HOOK, Router
from plugins.shared.routing import (
    COLUMNS,
    DeviceFacts,
    ReplicaSnapshot,
    ReplicaTable,
    RouteQuery,
    Ticket,
)
from tests.plugins.conformance.cost import Cost
from tests.plugins.conformance.forbidden import Forbidden, ForbiddenCallError
from tests.plugins.conformance.rules import BrokenRuleError
from tests.plugins.conformance.subject import NAME, Subject
from tests.plugins.conformance.watch import CLOCK_NS, PoisonError

EVENTS, REPLICAS, PAGES, PAGE = 307, 5, 400, 16  # a prime: whoever takes turns ends elsewhere
COSTED = 8, 64


@dataclass
class Watched:
    """Passes queries on to a router's policy and looks at what it does with them."""

    plugin: Any
    poisoned: bool = False
    broken: list[tuple[str, str]] = field(default_factory=list)  # rule, text
    times_ns: list[int] = field(default_factory=list)
    reads: int = 0

    def __post_init__(self) -> None:
        self.oracle = bool(getattr(self.plugin, "oracle", False))
        self.forbidden = Forbidden(lambda text: self.broken.append(("clock and chance", text)))

    @hookimpl
    def decide_route(self, query: RouteQuery) -> Any:
        if self.poisoned:
            query = replace(query, cached_tokens=self._poison)
        before = _copied(query)
        start_ns = CLOCK_NS()
        with self.forbidden.hook():
            answer = self.plugin.decide_route(query=query)
        self.times_ns.append(CLOCK_NS() - start_ns)
        if not self.poisoned and _copied(query) != before:
            self.broken.append(("queries", "its query was changed"))
        return answer

    def _poison(self) -> Any:
        self.reads += 1
        raise PoisonError


class Scene:
    """Replicas that report and a router before them; everything is drawn from one seed."""

    def __init__(self, watched: Watched, seed: int, replicas: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.registry = Registry()
        hooks = Hooks({}, {NAME: watched})
        self.router = Router(hooks, self.registry, PrefixView(PAGE), seed, starts=self._starts)
        self.open: list[Ticket] = []
        self.now_s = 0.0
        self.names = [f"replica-{index}" for index in range(replicas)]
        self.numbers = dict.fromkeys(self.names, 0)
        self.incarnations: dict[str, int] = {}
        for name in self.names:
            self.join(name)

    def join(self, name: str) -> None:
        self.incarnations[name] = self.registry.join(name, self.now_s)
        self.report(name)

    def report(self, name: str, degrees: float | None = None) -> None:
        """What its open tickets would make of an engine that has them all."""
        self.numbers[name] += 1
        mine = [ticket for ticket in self.open if ticket.replica == name]
        held = min(sum(ticket.pages for ticket in mine), PAGES)
        evictable = int(self.rng.integers(0, PAGES - held + 1))
        snapshot = ReplicaSnapshot(
            replica=name,
            number=self.numbers[name],
            received=max((ticket.number for ticket in mine), default=0),
            time_s=0.0,
            page_size=PAGE,
            pool_pages=PAGES,
            pages_free=PAGES - held - evictable,
            pages_evictable=evictable,
            pages_promised=len(mine),
            running=len(mine),
            waiting=0,
            prompt_tokens=8 * len(mine),
            kv_tokens=PAGE * held,
            device=DeviceFacts(temperature_c=degrees),
        )
        self.router.report(self.incarnations[name], snapshot, self.now_s)

    def route(self, request: Request) -> Ticket:
        """One comes every 50 ms."""
        self.now_s += 0.05
        ticket = self.router.route(request, float(self.rng.integers(1, 200)), self.now_s)
        self.open.append(ticket)
        return ticket

    def _starts(self, request: Request, table: ReplicaTable) -> Any:
        return table.requests.astype(np.float64)


def keeps_its_contract(subject: Subject) -> None:
    """Valid answers to every query, nothing changed, no clock and no chance but the query's; the
    same seed gives the same routes, whatever was routed before."""
    first, second = _routes(subject, 1), _routes(subject, 1)
    _routes(subject, 2)
    if first != second or first != _routes(subject, 1):
        text = "two routers of one seed differ: state in a class or module, or chance of its own"
        raise BrokenRuleError("determinism", subject, HOOK, text)


def spreads_load(subject: Subject) -> str:
    """Of equal requests that nobody has seen and that do not end, every replica gets some."""
    watched = Watched(subject.make())
    scene = Scene(watched, 3, REPLICAS)
    for number in range(40 * REPLICAS):
        prompt = np.arange(number * 1000, number * 1000 + 64)
        scene.route(_request(f"r{number}", prompt))
        for name in scene.names if number % 7 == 0 else ():
            scene.report(name)
    counts = [scene.registry.num_open(name) for name in scene.names]
    text = f"of {40 * REPLICAS} equal requests the replicas got {counts}"
    if min(counts) == 0 and not subject.starves:
        raise BrokenRuleError("starvation", subject, HOOK, text)
    return text


def lets_exceptions_pass(subject: Subject) -> None:
    """What a query raises when it is read comes out of the hook."""
    watched = Watched(subject.make(), poisoned=True)
    scene = Scene(watched, 4, 2)
    for number in range(3):
        try:
            scene.route(_request(f"r{number}", np.arange(64)))
        except PoisonError:
            continue
        if watched.reads:
            text = f"swallowed an exception that its query raised ({PoisonError.__name__})"
            raise BrokenRuleError("exceptions", subject, HOOK, text)


def costs(subject: Subject) -> Iterator[Cost]:
    """Of a decision among so many replicas: reported, never judged."""
    for replicas in COSTED:
        watched = Watched(subject.make())
        scene = Scene(watched, 5, replicas)
        for number in range(200):
            for name in scene.names if number % 20 == 0 else ():
                scene.report(name)
            scene.route(_request(f"r{number}", np.arange(2000) + number % 20))
        times_us = np.array(watched.times_ns) / 1e3
        name = f"{HOOK} of {replicas} replicas"
        yield Cost(name, 200, len(times_us), times_us.mean(), np.percentile(times_us, 99))


def _routes(subject: Subject, seed: int) -> list[tuple[str, str]]:
    watched = Watched(subject.make())
    scene, routes = Scene(watched, seed, REPLICAS), []
    with watched.forbidden.watching(subject.package):
        for number in range(EVENTS):
            _befall(scene, number)
            try:
                ticket = scene.route(_drawn(scene.rng, number))
            except PolicyError as error:
                raise BrokenRuleError("decisions", subject, HOOK, str(error)) from error
            except ForbiddenCallError:
                break  # it is in watched.broken
            routes.append((ticket.request_id, ticket.replica))
    for rule, text in watched.broken:
        raise BrokenRuleError(rule, subject, HOOK, text)
    return routes


def _befall(scene: Scene, number: int) -> None:
    """What happens to replicas before a request comes."""
    rng, names = scene.rng, scene.names
    for ticket in [one for one in scene.open if rng.random() < 0.1]:
        scene.open.remove(ticket)
        (scene.router.refused if rng.random() < 0.2 else scene.router.ended)(ticket)
    if number % 5 == 0:
        for name in names:
            degrees = None if rng.random() < 0.3 else float(rng.uniform(40, 95))
            scene.report(name, degrees)
    if number % 60 == 30:
        lost = names[number // 60 % len(names)]
        scene.router.fail(scene.incarnations[lost], lost, "killed")
        scene.open = [ticket for ticket in scene.open if ticket.replica != lost]
    if number % 60 == 45:
        scene.join(names[number // 60 % len(names)])
    if number % 90 in (10, 40):
        scene.registry.drain(names[-1], draining=number % 90 == 10)


def _drawn(rng: np.random.Generator, number: int) -> Request:
    family, own = int(rng.integers(12)), int(rng.integers(1, 120))
    begins = np.arange(family * 1000, family * 1000 + PAGE * (family % 9))
    prompt = np.concatenate([begins, rng.integers(20_000, 30_000, own)])
    return _request(f"r{number}", prompt, session=f"s{family}", cache=number % 11 != 0)


def _request(name: str, prompt: Any, **facts: Any) -> Request:
    params = SamplingParams(max_tokens=200)
    return Request(name, prompt.astype(np.int32), params, forced_output=50, **facts)


def _copied(query: RouteQuery) -> Any:
    columns = {name: getattr(query.replicas, name).tobytes() for name in COLUMNS}
    asked = query.request
    request = asked.request_id, asked.prompt.tobytes(), asked.params, asked.session
    return columns, query.replicas.ids, request, query.predicted_output, query.now_s
