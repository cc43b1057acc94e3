"""The front-end processes: started, watched and stopped by the engine's."""

import multiprocessing
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

from plugins.server.client import Facts
from plugins.server.settings import Settings
from plugins.server.signals import STOP_SIGNALS

GRACE_S = 5.0  # for answers to be written out after the last token

Work = Callable[[Settings, socket.socket, str, Facts], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """A front end that is gone. exit_code: negative for a signal."""

    front: int
    exit_code: int | None
    lived_s: float


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    begun_s: float = field(default_factory=time.monotonic)


class Workers:
    """Processes that each run `work(settings, listening socket, channel address, facts)`.

    Stop signals do not reach `work`: a terminal sends them to all processes of a group, and it is
    the engine's process that ends the front ends, by a Goodbye."""

    def __init__(self, start_one: Callable[[], BaseProcess] | None = None) -> None:
        self._start_one = start_one
        self._workers: dict[int, _Worker] = {}
        self._new: queue.SimpleQueue[BaseProcess] = queue.SimpleQueue()
        self._starting: list[threading.Thread] = []

    @classmethod
    def start(
        cls,
        settings: Settings,
        listener: socket.socket,
        address: str,
        facts: Facts,
        work: Work | None = None,
    ) -> "Workers":
        """Start `settings.workers` of them. work: importable by name; None = serve_worker."""
        context = multiprocessing.get_context("spawn")
        arguments = (work or _serve, settings, listener, address, facts)

        def start_one() -> BaseProcess:
            process = context.Process(target=_undisturbed, args=arguments, name="front end")
            process.start()
            return process

        workers = cls(start_one)
        for _ in range(settings.workers):
            workers._add(start_one())
        return workers

    @property
    def sentinels(self) -> set[int]:
        """Descriptors of those not known to have ended; each is readable once its process has."""
        return set(self._workers)

    @property
    def fronts(self) -> set[int]:
        """Process ids of the same."""
        pids = (worker.process.pid for worker in self._workers.values())
        return {pid for pid in pids if pid is not None}

    def ended(self, sentinel: int) -> Ended:
        """Take note of an end."""
        worker = self._workers.pop(sentinel)
        process = worker.process
        process.join()
        assert process.pid is not None, "it was started"
        return Ended(process.pid, process.exitcode, time.monotonic() - worker.begun_s)

    def kill(self, front: int) -> None:
        """End one at once; its sentinel tells."""
        for worker in self._workers.values():
            if worker.process.pid == front:
                worker.process.kill()

    def start_another(self) -> None:
        """In a thread: what a front end is told, a tokenizer too, takes a step's time to hand
        over. `arrived` tells of it."""
        start_one = self._start_one
        assert start_one is not None, "these workers were not started here"
        thread = threading.Thread(target=lambda: self._new.put(start_one()), name="front end")
        thread.start()
        self._starting.append(thread)

    def arrived(self) -> list[int]:
        """Sentinels of others that were started meanwhile, each told once."""
        sentinels: list[int] = []
        while not self._new.empty():
            sentinels.append(self._add(self._new.get()))
        return sentinels

    def stop(self, at_once: bool = False) -> None:
        """Wait for all to end, GRACE_S at most, and kill who does not."""
        for thread in self._starting:
            thread.join()
        self.arrived()
        until_s = time.monotonic() + (0.0 if at_once else GRACE_S)
        for worker in self._workers.values():
            process = worker.process
            process.join(max(until_s - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()

    def _add(self, process: BaseProcess) -> int:
        self._workers[process.sentinel] = _Worker(process)
        return process.sentinel


def _undisturbed(
    work: Work, settings: Settings, listener: socket.socket, address: str, facts: Facts
) -> None:
    for one in STOP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    work(settings, listener, address, facts)


def _serve(settings: Settings, listener: socket.socket, address: str, facts: Facts) -> None:
    from plugins.server.worker import serve_worker  # the engine's process needs no HTTP

    serve_worker(settings, listener, address, facts)
