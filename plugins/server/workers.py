"""The front-end processes: started, watched and stopped by the engine's."""

import multiprocessing
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from plugins.server.client import Facts
from plugins.server.settings import Settings
from plugins.server.signals import STOP_SIGNALS

GRACE_S = 5.0  # for answers to be written out after the last token

Work = Callable[[Settings, socket.socket, str, Facts], None]


class Workers:
    """Processes that each run `work(settings, listening socket, channel address, facts)`.

    Stop signals do not reach `work`: a terminal sends them to all processes of a group, and it is
    the engine's process that ends the front ends, by a Goodbye."""

    def __init__(self, processes: list[BaseProcess]) -> None:
        self._processes = {process.sentinel: process for process in processes}

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
        processes: list[BaseProcess] = []
        for number in range(settings.workers):
            process = context.Process(target=_undisturbed, args=arguments, name=f"front{number}")
            process.start()
            processes.append(process)
        return cls(processes)

    @property
    def sentinels(self) -> set[int]:
        """Descriptors of those not known to have ended; each is readable once its process has."""
        return set(self._processes)

    @property
    def fronts(self) -> set[int]:
        """Process ids of the same."""
        return {process.pid for process in self._processes.values() if process.pid is not None}

    def ended(self, sentinel: int) -> tuple[int, int | None]:
        """Take note of an end: process id and exit code, negative for a signal."""
        process = self._processes.pop(sentinel)
        process.join()
        assert process.pid is not None, "it was started"
        return process.pid, process.exitcode

    def kill(self, front: int) -> None:
        """End one at once; its sentinel tells."""
        for process in self._processes.values():
            if process.pid == front:
                process.kill()

    def stop(self, at_once: bool = False) -> None:
        """Wait for all to end, GRACE_S at most, and kill who does not."""
        until_s = time.monotonic() + (0.0 if at_once else GRACE_S)
        for process in self._processes.values():
            process.join(max(until_s - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes.clear()


def _undisturbed(
    work: Work, settings: Settings, listener: socket.socket, address: str, facts: Facts
) -> None:
    for one in STOP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    work(settings, listener, address, facts)


def _serve(settings: Settings, listener: socket.socket, address: str, facts: Facts) -> None:
    from plugins.server.worker import serve_worker  # the engine's process needs no HTTP

    serve_worker(settings, listener, address, facts)
