"""The replicas as Ray actors. Ray places them, tells of their deaths, and starts them again."""

import importlib
import logging
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.config import require
from core.errors import ConfigError
from plugins.mode.replicas.actor import THREADS, Replica
from plugins.mode.replicas.messages import Born, News, Order, Orders
from plugins.mode.replicas.plan import Plan

RETRY_S = 1.0  # until a replica that could not be built is started anew
STOP_S = 10.0  # for engines to end
REACH_S = 5.0
RETRIES = 3
STORE_BYTES = 256 << 20  # nearly all that crosses goes without Ray's store
LOOPBACK = "127.0.0.1"
# Ray reads these of the environment of who connects. By the first it waits for details of a death
# before it tells of it, 1 s otherwise: streams stand still meanwhile. By the second it reports to
# nobody.
VARIABLES = {"RAY_timeout_ms_task_wait_for_death_info": "100", "RAY_USAGE_STATS_ENABLED": "0"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Came:
    """What is heard of a replica: it was born, has news, or is lost (birth: which incarnation).
    None of these: it could not be built, and why."""

    replica: str
    birth: str
    born: Born | None = None
    news: Sequence[News] = ()
    lost: str = ""


class Fleet(Protocol):
    """The replicas as the router's loop sees them. names: of all, in order. descriptor: readable
    when `came` has something to tell."""

    names: tuple[str, ...]
    descriptor: int

    def came(self) -> list[Came]:
        """What was heard since the last call, in order."""

    def send(self, replica: str, birth: str, orders: list[Order]) -> None:
        """Hand over orders; never waits. Those for an incarnation that is gone are dropped."""

    def restart(self, replica: str, birth: str) -> None:
        """End a replica that does not answer, so that another incarnation starts."""

    def close(self) -> None:
        """End all."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """address: of a running cluster ("auto": the one of this machine), None = one of this machine
    for this run alone. cpus: of Ray's CPUs for a replica, None = an equal share of this machine's,
    or 1 of a cluster's. gpus: of Ray's GPUs for a replica on CUDA devices, None = as many as those
    devices; a part of one for replicas that share it. dashboard: Ray's."""

    address: str | None = None
    cpus: float | None = None
    gpus: float | None = None
    dashboard: bool = False

    def __post_init__(self) -> None:
        require(self.address != "", "ray.address", "null or not empty", self.address)
        require(self.cpus is None or self.cpus >= 0, "ray.cpus", ">= 0", self.cpus)
        require(self.gpus is None or self.gpus > 0, "ray.gpus", "> 0 or null", self.gpus)

    def gpus_for(self, plan: Plan) -> float:
        """Ray's GPUs for one of its replicas, on a CPU none. Raises ConfigError for fewer than it
        computes on."""
        if plan.device == "cpu":
            return 0.0
        count = plan.num_devices
        holds = self.gpus is None or count == 1 or self.gpus >= count
        require(holds, "ray.gpus", f">= {count} = executor.tensor_parallel, or null", self.gpus)
        return count if self.gpus is None else self.gpus


class Mailbox:
    """What threads tell the router's loop, which sleeps on `descriptor`."""

    def __init__(self) -> None:
        self.descriptor, self._bell = os.pipe()
        os.set_blocking(self.descriptor, False)
        self._lock = threading.Lock()
        self._came: deque[Came] = deque()
        self._rung = False

    def put(self, came: Came) -> None:
        """Add, and ring."""
        with self._lock:
            self._came.append(came)
            if not self._rung:
                self._rung = True
                os.write(self._bell, b".")

    def take(self) -> list[Came]:
        """All there is."""
        with self._lock:
            came = list(self._came)
            self._came.clear()
            if self._rung:
                self._rung = False
                os.read(self.descriptor, 16)
            return came

    def close(self) -> None:
        """Nobody listens any more."""
        with self._lock:
            self._rung = True  # no more ringing
            os.close(self.descriptor)
            os.close(self._bell)


class RayFleet:
    """`num` replicas, each followed by a thread. Connects to Ray, and starts them."""

    def __init__(self, plan: Plan, num: int, settings: RaySettings) -> None:
        gpus = settings.gpus_for(plan)
        self.names = tuple([str(index) for index in range(num)])
        self._ray = _import_ray()
        self._mailbox = Mailbox()
        self.descriptor = self._mailbox.descriptor
        self._sent: dict[str, int] = {}  # birth -> batches
        self._closing = threading.Event()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        _connect(self._ray, settings, max(cores or 1, num), gpus * num)
        local = settings.address is None
        share = max((cores or 1) // num, 1) if local else 1
        options: dict[str, Any] = {
            "num_cpus": share if settings.cpus is None else settings.cpus,
            "num_gpus": gpus,
            "max_restarts": -1,
            "max_concurrency": THREADS,
        }
        actor = self._ray.remote(Replica)
        self._actors = {
            name: actor.options(name=f"{plan.folder.name}-{name}", **options).remote(plan, name)
            for name in self.names
        }
        self._threads = [
            threading.Thread(target=self._follow, args=(name,), name=f"replica {name}", daemon=True)
            for name in self.names
        ]
        for thread in self._threads:
            thread.start()

    def facts(self, replica: str) -> dict[str, Any]:
        """What a server needs to know, of a replica that was born."""
        facts: dict[str, Any] = self._ray.get(self._actors[replica].facts.remote())
        return facts

    def came(self) -> list[Came]:
        """See Fleet.came."""
        return self._mailbox.take()

    def send(self, replica: str, birth: str, orders: list[Order]) -> None:
        """See Fleet.send."""
        number = self._sent[birth] = self._sent.get(birth, -1) + 1
        body = pickle.dumps(Orders(time.perf_counter(), orders), pickle.HIGHEST_PROTOCOL)
        try:
            # Tried again where a connection broke: a replica takes a batch once.
            take = self._actors[replica].take.options(max_task_retries=RETRIES)
            take.remote(birth, number, body)
        except self._ray.exceptions.RayError as error:  # its thread hears of it, too
            logger.warning("replica %s takes nothing: %s", replica, _first_line(error))

    def restart(self, replica: str, birth: str) -> None:
        """See Fleet.restart."""
        self._sent.pop(birth, None)
        self._kill(replica, again=True)

    def close(self) -> None:
        """See Fleet.close."""
        self._closing.set()
        for actor in self._actors.values():
            actor.stop.remote()
        until_s = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        for name in self.names:
            self._kill(name, again=False)
        self._ray.shutdown()
        self._mailbox.close()

    def _kill(self, replica: str, again: bool) -> None:
        self._ray.kill(self._actors[replica], no_restart=not again)

    def _follow(self, name: str) -> None:
        birth = ""
        while not self._closing.is_set():
            born = self._await_birth(name, birth)
            if born is None:
                self._closing.wait(RETRY_S)
                continue
            birth = born.birth
            self._mailbox.put(Came(name, birth, born=born))
            lost = self._hear(name, birth)
            if not self._closing.is_set():
                self._mailbox.put(Came(name, birth, lost=lost))

    def _await_birth(self, name: str, before: str) -> Born | None:
        """The next incarnation; None: not yet. One that was given up and lives is ended."""
        try:
            born: Born = self._ray.get(self._actors[name].ready.remote())
        except self._ray.exceptions.RayTaskError as error:
            self._mailbox.put(Came(name, "", lost=_first_line(error.cause)))
            self._kill(name, again=True)
            return None
        except self._ray.exceptions.RayError as error:
            logger.info("replica %s is not there: %s", name, _first_line(error))
            return None
        if born.birth == before:
            self._kill(name, again=True)
            return None
        return born

    def _hear(self, name: str, birth: str) -> str:
        """Pass news on until there is none; returns why."""
        stream = self._actors[name].news.options(num_returns="streaming").remote()
        try:
            for reference in stream:
                news: list[News] = pickle.loads(self._ray.get(reference))
                self._mailbox.put(Came(name, birth, news=news))
                if news[-1].fault:
                    return news[-1].fault
        except self._ray.exceptions.RayError as error:
            return _first_line(error)
        return "its engine ended"


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "replicas > 1 needs Ray in mode serve: pip install '.[replicas]'"
        ) from None


def _connect(ray: Any, settings: RaySettings, cpus: int, gpus: float) -> None:
    """To a cluster that runs, or to a new one of this machine, with `cpus` to give away: a replica
    needs one even where there are more replicas than cores. gpus: that all replicas need; one that
    finds none on a cluster waits for them, which on this machine alone nobody adds."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR}
    if settings.address is None:
        quiet |= {"include_dashboard": settings.dashboard, "object_store_memory": STORE_BYTES}
        # Nobody else is to reach it, and it needs no network.
        ray.init(address="local", num_cpus=cpus, _node_ip_address=LOOPBACK, **quiet)
        found = ray.cluster_resources().get("GPU", 0)
        if gpus > found:
            ray.shutdown()
            rule = f"few enough for the {found:g} GPUs that Ray finds here"
            raise ConfigError(f"replicas must be {rule}, got a need of {gpus:g}")
        return
    try:
        host, _, port = settings.address.rpartition(":")
        if host and "/" not in host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), REACH_S).close()
        ray.init(address=settings.address, **quiet)
    except OSError as error:
        rule = f"a cluster that can be reached ({_first_line(error)})"
        raise ConfigError(f"ray.address must be {rule}, got {settings.address!r}") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
