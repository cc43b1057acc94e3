"""A rank other than the first: a process that computes the same launches over its part of the
model, by the same runner."""

import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from core.clock import Clock
from core.config import EngineConfig
from core.errors import ConfigError, TritiumError, described
from core.launch import Launch
from core.queries import ExecutorQuery
from plugins.executor.parallel_group import connect
from plugins.executor.parallel_ranks import Failed, leave_with_parent, remove
from plugins.executor.torch_executor import MAX_IN_FLIGHT, TorchExecutor
from plugins.shared.model_protocols import ModelShards, RankGroup

STORE = "store"


class Runner(Protocol):
    """What builds an executor over a model (plugins/executor/torch_runner.py); it pickles."""

    def over(
        self, model: Any, query: ExecutorQuery, group: RankGroup | None = None
    ) -> TorchExecutor:
        """It. group: of the model's ranks."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank builds its executor from. device_type: rank r is on device r of this type.
    folder: the store through which ranks meet is there. num_threads: of torch, on a CPU."""

    shards: ModelShards
    runner: Runner
    engine: EngineConfig
    seed: int
    clock: Clock
    attention: Callable[[Any], Any]
    device_type: str
    folder: str
    num_threads: int

    def store(self) -> FileStore:
        """Where ranks meet."""
        return FileStore(str(Path(self.folder) / STORE), self.shards.num_ranks)

    def executor(self, model: Any, rank: int, progress: bool = False) -> TorchExecutor:
        """Meet the others, and build it over the rank's part of the model."""
        size, device = self.shards.num_ranks, torch.device(model.device)
        group = connect(self.store(), rank, size, device, self.engine.deterministic)
        model.join(group)
        parts = self.clock, lambda: model, self.attention, progress
        query = ExecutorQuery(self.engine, self.seed, *parts)
        return self.runner.over(model, query, group)


def run_rank(rank: int, connection: Connection) -> None:
    """The process. NCCL's clean-up would wait for ranks that are gone, so it ends without."""
    for one in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all of a group
        signal.signal(one, signal.SIG_IGN)
    folders: list[str] = []
    leave_with_parent(folders)
    holds = serve(rank, connection, folders)
    sys.stderr.flush()
    os._exit(0 if holds else 1)


def serve(rank: int, connection: Connection, folders: list[str]) -> bool:
    """Load, say so, meet the others when told to, and follow; whether that ended well. An error
    goes to the first rank. folders: that of the setup is added, and removed if the first rank is
    gone, who would have done so."""
    try:
        setup: RankSetup | None = pickle.loads(connection.recv_bytes())
        if setup is None:
            return True
        folders.append(setup.folder)
        torch.set_num_threads(setup.num_threads)
        model = _load(setup, rank)
        connection.send(None)
        connection.recv()
        follow(setup.executor(model, rank), connection)
    except EOFError:
        remove(folders)
    except Exception as error:
        _tell(connection, error)
        return False
    return True


def follow(executor: TorchExecutor, connection: Connection) -> None:
    """Make every launch that comes, until None does; a method's name with a layout is answered with
    what it returns. Nobody reads the results: one is collected when the third launch comes."""
    in_flight = 0
    while (message := connection.recv()) is not None:
        if not isinstance(message, Launch):
            method, layout = message
            answer = getattr(executor, method)(layout)
            # As in plugins/mode/running.py: what start-up left is there to the end.
            gc.collect()
            gc.freeze()
            connection.send(answer)
            continue
        if in_flight == MAX_IN_FLIGHT:
            executor.collect()
            in_flight -= 1
        executor.launch(message)
        in_flight += 1


def _load(setup: RankSetup, rank: int) -> Any:
    if setup.device_type != "cuda":
        return setup.shards.build(rank, setup.device_type)
    torch.cuda.set_device(rank)  # Triton launches on the current device
    return setup.shards.build(rank, f"cuda:{rank}")


def _tell(connection: Connection, error: Exception) -> None:
    if not isinstance(error, TritiumError):
        traceback.print_exc()
    with suppress(OSError):
        connection.send(Failed(described(error), isinstance(error, ConfigError)))
