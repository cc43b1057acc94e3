"""A replica's process: an engine in a thread, and what Ray calls."""

import logging
import os
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from core.errors import described
from plugins.mode.device_lock import lock_of
from plugins.mode.facts import facts
from plugins.mode.replicas.desk import Desk
from plugins.mode.replicas.devices import DeviceWatch, device_reader
from plugins.mode.replicas.messages import Born
from plugins.mode.replicas.plan import Plan
from plugins.mode.running import running
from plugins.mode.serve_loop import ServeLoop
from plugins.mode.summary import summarise
from plugins.mode.warm_up import warm_up
from plugins.shared.replica_report import Reporter
from plugins.shared.session import Session

FAREWELL_S = 0.5  # for the last news to be on its way before a broken process ends
THREADS = 8  # of Ray, that its calls may use at once
logger = logging.getLogger(__name__)


class Replica:
    """Ray makes it an actor. An engine that breaks takes the process along, by `leave`, and Ray
    starts another."""

    def __init__(self, plan: Plan, name: str, leave: Callable[[int], object] = os._exit) -> None:
        self._plan = plan
        self._name = name
        self._leave = leave
        self._birth = uuid.uuid4().hex
        self._taking = threading.Lock()
        self._built = threading.Event()
        self._desk: Desk | None = None
        self._born: Born | None = None
        self._facts: dict[str, Any] = {}
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def ready(self) -> Born:
        """Returns when requests can be served; raises what building the engine raised."""
        self._built.wait()
        if self._error is not None:
            raise self._error
        assert self._born is not None, "it is built"
        return self._born

    def facts(self) -> dict[str, Any]:
        """What a server needs to know of the engine (plugins.shared.server_protocol)."""
        self.ready()
        return self._facts

    def take(self, birth: str, number: int, orders: bytes) -> None:
        """A batch of orders, meant for the incarnation `birth` alone."""
        if birth == self._birth and self._desk is not None:
            with self._taking:
                self._desk.take(number, pickle.loads(orders))

    def news(self) -> Iterator[bytes]:
        """Lists of News, pickled, until the engine has ended."""
        self.ready()
        assert self._desk is not None, "it is built"
        for batch in self._desk.news():
            yield pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)

    def stop(self) -> None:
        """End what runs, then the engine."""
        if self._desk is not None:
            self._desk.stop()

    def _work(self) -> None:
        try:
            self._serve(self._plan.session())
        except BaseException as error:
            if not self._built.is_set():
                self._error = error
                self._built.set()
                return
            logger.critical("replica %s: the engine did not end well", self._name, exc_info=error)
            self._leave(1)

    def _serve(self, session: Session) -> None:
        plan = self._plan
        with (
            lock_of(session, plan.lock),
            running(session, contains_faults=True) as (engine, _),
        ):
            if plan.warmup:
                warm_up(engine)
            session.hooks.notify("on_run_start", session.run)
            device = DeviceWatch(device_reader(plan.device))
            self._desk = Desk(engine, Reporter(self._name), device)
            self._facts = facts(session, engine)
            host = socket.gethostname()
            self._born = Born(self._birth, os.getpid(), host, engine.executor.describe())
            loop = ServeLoop(engine, self._desk, plan.report_s, faults_end=True)
            self._built.set()
            try:
                loop.run()
            except BaseException as error:
                self._break(error, self._desk)
            summary = summarise(list(loop.recent), loop.totals)
            session.hooks.notify("on_run_end", {"replica": self._name, **summary})
            device.close()
            self._desk.close()

    def _break(self, error: BaseException, desk: Desk) -> None:
        """End the process; what is left of the engine is not to be trusted to close."""
        logger.critical("replica %s: the engine stopped", self._name, exc_info=error)
        desk.fail(described(error))
        time.sleep(FAREWELL_S)
        self._leave(1)
        raise error
