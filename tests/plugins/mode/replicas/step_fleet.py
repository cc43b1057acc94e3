"""Replicas in this process, a step at a time: engines on scripted tokens, deaths when a test says
so, and a server that plays the client. Nothing runs by itself."""

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.engine import Engine
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.queries import StepEvent
from core.records import RequestRecord
from core.request import Request, SamplingParams
from plugins.mode.replicas.desk import Desk
from plugins.mode.replicas.devices import DeviceWatch
from plugins.mode.replicas.fleet import Came
from plugins.mode.replicas.loop import RouterLoop
from plugins.mode.replicas.messages import Born, Order, Orders
from plugins.mode.replicas.traffic import Traffic
from plugins.mode.serve_loop import ServeLoop
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.router.round_robin import RoundRobin
from plugins.shared.clocks import VirtualClock
from plugins.shared.prefix_view import PrefixView
from plugins.shared.replica_registry import Registry
from plugins.shared.replica_report import Reporter
from plugins.shared.router import Router
from plugins.shared.server_protocol import Steer
from tests.engine_harness import make_engine, prompt, script

SUSPECT_S, DEAD_S = 3.0, 10.0


def ask(name: str, tokens: int = 30, prompt_tokens: int = 20, **params: Any) -> Request:
    """A request whose stream is as long as it asks."""
    asked = {"max_tokens": tokens, "ignore_eos": True} | params
    return Request(name, prompt(name, prompt_tokens), SamplingParams(**asked))


class One:
    """An incarnation: its engine under the loop of mode serve."""

    def __init__(self, name: str, birth: str, engine: Engine) -> None:
        self.birth = birth
        self.engine = engine
        self.desk = Desk(engine, Reporter(name), DeviceWatch(None))
        self.loop = ServeLoop(engine, self.desk, report_s=1e-9, faults_end=True)
        self.batches = 0
        self.silent = False  # it takes requests and never answers
        self.draining = False

    def step(self) -> None:
        """What one round of ServeLoop.run does."""
        self.loop._take(self.desk.poll(0.0))
        if self.engine.has_work:
            self.loop._step()
        self.loop._report()

    def news(self) -> list[Any]:
        found = []
        while not self.desk._outbox.empty():
            found.append(self.desk._outbox.get())
        return pickle.loads(pickle.dumps(found))  # as it crosses


class StepFleet:
    """plugins.mode.replicas.fleet.Fleet; `step` runs all that live."""

    def __init__(self, names: Sequence[str], engine: Callable[[], Engine]) -> None:
        self.names = tuple(names)
        self.descriptor, self._write = os.pipe()
        self.alive: dict[str, One] = {}
        self.restarted: list[str] = []
        self._engine = engine
        self._came: deque[Came] = deque()
        self._births = 0

    def start(self, name: str) -> One:
        """A replica is born."""
        self._births += 1
        one = self.alive[name] = One(name, f"birth {self._births}", self._engine())
        self._came.append(Came(name, one.birth, born=Born(one.birth, 0, "here", {})))
        return one

    def kill(self, name: str, why: str = "killed") -> None:
        """It dies with all that it has not told yet."""
        one = self.alive.pop(name)
        self._came.append(Came(name, one.birth, lost=why))

    def step(self) -> None:
        """A step of every engine, and its news."""
        for name, one in list(self.alive.items()):
            if one.silent:
                continue
            try:
                one.step()
            except Exception as error:
                self.kill(name, f"broke: {error}")
                continue
            self._came.append(Came(name, one.birth, news=one.news()))

    def came(self) -> list[Came]:
        came = list(self._came)
        self._came.clear()
        return came

    def send(self, replica: str, birth: str, orders: list[Order]) -> None:
        one = self.alive.get(replica)
        if one is not None and one.birth == birth:
            one.desk.take(
                one.batches, pickle.loads(pickle.dumps(Orders(time.perf_counter(), orders)))
            )
            one.batches += 1

    def restart(self, replica: str, birth: str) -> None:
        self.restarted.append(replica)
        self.alive.pop(replica, None)

    def close(self) -> None:
        pass


class Client:
    """The server: what it is given to send, and what came back."""

    def __init__(self) -> None:
        self.draining = False
        self.items: list[Request | str | Steer] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[Any]] = {}
        self.ended: dict[str, RequestRecord] = {}
        self.refused: dict[str, str] = {}
        self.reports: list[dict[str, Any]] = []

    def watch(self, descriptor: int) -> None:
        pass

    def poll(self, timeout_s: float) -> Sequence[Request | str | Steer]:
        items, self.items = self.items, []
        return items

    def refuse(self, request_id: str, error: str) -> None:
        assert request_id not in self.refused
        assert request_id not in self.ended
        self.refused[request_id] = error

    def publish(self, event: StepEvent, records: Mapping[str, RequestRecord]) -> None:
        for key, token in zip(event.rows, event.token_ids.tolist(), strict=True):
            assert key[0] not in self.ended, "no token after the end"
            assert key[0] not in self.refused
            self.tokens.setdefault(key, []).append(token)
            if records[key[0]].choices[key[1]].logprobs:
                self.logprobs.setdefault(key, []).append(
                    records[key[0]].choices[key[1]].logprobs[-1]
                )
        for record in event.finished:
            assert record.request_id not in self.ended, "one end each"
            self.ended[record.request_id] = record

    def report(self, state: dict[str, Any]) -> None:
        self.reports.append(state)

    def close(self) -> None:
        pass


class Rig:
    """`tick` is a round of the router's loop and a step of every engine, a tenth of a second."""

    def __init__(self, replicas: int = 2, policy: object | None = None, **engine: Any) -> None:
        self.now_s = 0.0
        self.client = Client()
        self.fleet = StepFleet([str(index) for index in range(replicas)], lambda: make(**engine))
        self.registry = Registry(SUSPECT_S, DEAD_S)
        hooks = Hooks({"router": policy or RoundRobin()}, {})
        router = Router(hooks, self.registry, PrefixView(16), seed=0)
        self.traffic = Traffic(
            self.fleet, self.client, router, MaxTokensShare(), VirtualClock(), seed=0
        )
        self.loop = RouterLoop(
            self.fleet, self.client, router, self.traffic, 1e-9, lambda: self.now_s
        )
        for name in self.fleet.names:
            self.fleet.start(name)
        self.tick(2)

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_s += 0.1
            self.fleet.step()
            self.loop.turn()

    def send(self, *requests: Request) -> None:
        self.client.items += requests
        self.tick()

    def finish(self, most: int = 2000) -> None:
        """Until every request has ended; then nothing is counted any more."""
        for _ in range(most):
            if not self.traffic.streams:
                break
            self.tick()
        assert not self.traffic.streams, "not done"
        self.tick(3)
        for one, _ in self.registry.listed(self.now_s):
            assert one.open == {}, "every ticket is closed"
        assert not self.traffic._choices
        assert not self.traffic._asked
        assert self.traffic.parked == 0
        for one in self.fleet.alive.values():
            assert not one.engine.has_work
            assert not one.desk._asked

    def place_of(self, name: str) -> str | None:
        ticket = self.traffic.streams[name].ticket
        return None if ticket is None else ticket.replica

    def whole(self, request: Request, choice: int = 0) -> list[int]:
        """The stream of an undisturbed run."""
        return script(make(), request, request.params.max_tokens, choice)

    def check(self, *requests: Request) -> None:
        """Their clients got exactly that."""
        for request in requests:
            assert self.client.ended[request.request_id].finish_reason == "length"
            for choice in range(request.params.n):
                got = self.client.tokens[request.request_id, choice]
                assert got == self.whole(request, choice), f"{request.request_id} {choice}"


def make(**engine: Any) -> Engine:
    return make_engine(**{"pages": 64, "overlap": True} | engine)


class Poison:
    """Breaks the engine in which a request with so many prompt tokens runs, once it has `at` tokens
    of output. met: beside whom, each time."""

    def __init__(self, prompt_tokens: int, at: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.at = at
        self.met: list[int] = []

    @hookimpl
    def decide_batch(self, query: Any) -> None:
        running = query.running
        found = (running.prompt == self.prompt_tokens) & (running.emitted >= self.at)
        if found.any():
            self.met.append(len(running) + query.waiting)
            raise RuntimeError("poison")
