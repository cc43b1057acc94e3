"""The other ranks as the first one sees them: processes that it starts, tells what to compute,
watches and ends.

Messages go through a pipe a rank, each of which has an end in one process only: whoever dies closes
it. A thread waits for processes to end; a rank that ends unasked is news, of which the first rank
hears wherever it waits. The others are ended at once then, since a collective would wait for ever.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

from core.errors import ConfigError, LaunchError, TritiumError

GRACE_S = 3.0
"""How long a rank may take to end when it is told to."""
NEWS_S = 5.0
"""How long after an error in a collective the news of a rank's end may come."""
logger = logging.getLogger(__name__)


class RankError(TritiumError):
    """A rank of a tensor-parallel model is lost, and its engine with it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank's process says of the error that ends it. mendable: it is a ConfigError."""

    text: str
    mendable: bool


@dataclass(slots=True)
class _News:
    """lost: what is known of a rank that ended unasked. on_loss: called then, once."""

    lost: str = ""
    closing: bool = False
    at_once: bool = False
    came: threading.Event = field(default_factory=threading.Event)
    on_loss: Callable[[], None] | None = None


class Ranks:
    """Ranks 1, 2, ... of a model. connections, processes: one each; without processes (they run in
    threads) nobody watches. folder: in which they find each other, this user's alone."""

    def __init__(
        self, connections: Sequence[Connection], processes: Sequence[BaseProcess] = ()
    ) -> None:
        self.size = 1 + len(connections)
        self._connections = list(connections)
        self._processes = list(processes)
        self.folder = tempfile.mkdtemp(prefix="tritium-ranks-")
        self._news = _News()
        # At exit before multiprocessing waits for its children.
        parts = self._connections, self._processes, self._news, self.folder
        self._end = Finalize(self, _end, parts, exitpriority=0)
        if processes:
            watch = self._processes, self._connections, self._news
            threading.Thread(target=_watch, args=watch, name="ranks", daemon=True).start()

    @classmethod
    def start(cls, size: int, run: Callable[[int, Connection], None]) -> "Ranks":
        """Start processes that each `run(rank, connection)`, importable by name."""
        context = multiprocessing.get_context("spawn")
        connections, processes = [], []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(rank, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        return cls(connections, processes)

    @property
    def lost(self) -> bool:
        """Whether one ended unasked."""
        return bool(self._news.lost)

    def on_loss(self, call: Callable[[], None]) -> None:
        """Call it, from another thread, when a rank is lost: what lets go of collectives."""
        self._news.on_loss = call

    def tell(self, message: object) -> None:
        """Send one message to all. Raises RankError if one is lost."""
        self.send_bytes(ForkingPickler.dumps(message))

    def send_bytes(self, message: bytes | memoryview) -> None:
        """As `tell`, of a pickled message."""
        self.check()
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError as error:
            raise self._loss(error) from error

    def replies(self) -> list[Any]:
        """One message from each, waiting for it. Raises RankError if one is lost or failed,
        ConfigError for one that failed by what a user can mend."""
        return [self._reply(index) for index in range(len(self._connections))]

    def check(self) -> None:
        """Raise RankError if one is lost."""
        if self._news.lost:
            raise RankError(self._news.lost)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """An error in the block comes as RankError where a rank's end explains it, and where the
        others have made a launch that failed here alone."""
        try:
            yield
        except (ConfigError, RankError):
            raise
        except LaunchError as error:
            raise RankError(f"tensor-parallel rank 0 fell behind the others: {error}") from error
        except Exception as error:
            raise self._loss(error) from error

    def close(self, at_once: bool = False) -> None:
        """End them all; if one is lost at once, without asking."""
        self._news.at_once |= at_once
        self._end()

    def _reply(self, index: int) -> Any:
        connection = self._connections[index]
        while not connection.poll(0.2):
            self.check()
        try:
            message = connection.recv()
        except (EOFError, OSError) as error:
            raise self._loss(error) from error
        if isinstance(message, Failed):
            text = f"tensor-parallel rank {index + 1}: {message.text}"
            raise ConfigError(text) if message.mendable else RankError(text)
        return message

    def _loss(self, error: Exception) -> Exception:
        """The news that explains the error, else the error."""
        if self._processes:
            self._news.came.wait(NEWS_S)
        return RankError(self._news.lost) if self._news.lost else error


def _watch(
    processes: Sequence[BaseProcess], connections: Sequence[Connection], news: _News
) -> None:
    """Wait for the first to end; unless it was told to, say so and end the others."""
    ended = wait([process.sentinel for process in processes])
    if news.closing:
        return
    index = next(i for i, process in enumerate(processes) if process.sentinel in ended)
    news.lost = _told(index, processes[index], connections[index])
    news.came.set()
    logger.error("%s", news.lost)
    for process in processes:
        process.kill()
    if news.on_loss is not None:
        news.on_loss()


def _told(index: int, process: BaseProcess, connection: Connection) -> str:
    """Who ended and why, by its last message if nobody read that."""
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    text = f"tensor-parallel rank {index + 1} (process {process.pid}) {how}; the engine ends"
    with suppress(EOFError, OSError):
        if connection.poll() and isinstance(last := connection.recv(), Failed):
            text += f": {last.text}"
    return text


def _end(
    connections: list[Connection], processes: list[BaseProcess], news: _News, folder: str
) -> None:
    news.closing = True
    for connection in connections:
        with suppress(OSError):
            connection.send(None)
    until_s = time.monotonic() + (0.0 if news.lost or news.at_once else GRACE_S)
    for process in processes:
        process.join(max(until_s - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
            process.join()
    for connection in connections:
        connection.close()
    remove([folder])


def leave_with_parent(folders: Sequence[str]) -> None:
    """End this process, at once, when the one that started it ends: it may be stuck in a collective
    that nobody will join. folders: what that one leaves behind, and is removed then."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            wait([parent.sentinel])
            remove(folders)
            os._exit(1)

        threading.Thread(target=watch, name="parent", daemon=True).start()


def remove(folders: Sequence[str]) -> None:
    """Remove what is there of them: other ranks may be at it, too."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
