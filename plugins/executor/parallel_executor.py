"""A tensor-parallel executor: the first rank's part, in the engine's process, and the others."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import torch

from core.config import require
from core.launch import Launch, LaunchResult, PoolLayout
from core.queries import ExecutorQuery
from plugins.executor.compile_watch import CompileWatch
from plugins.executor.parallel_group import TIMEOUT_S, DistributedGroup
from plugins.executor.parallel_pickle import packed
from plugins.executor.parallel_rank import RankSetup, Runner, run_rank
from plugins.executor.parallel_ranks import GRACE_S, RankError, Ranks
from plugins.executor.torch_executor import TorchExecutor
from plugins.shared.model_protocols import Model, check_shards

FIELD = "executor.tensor_parallel"


class ParallelExecutor:
    """core.protocols.Executor over ranks that make every launch together; `own` is rank 0's, the
    only one that samples. Results are its results. leave: called when it is closed."""

    computes = True

    def __init__(
        self, own: TorchExecutor, ranks: Ranks, leave: Callable[[], None] | None = None
    ) -> None:
        self._own = own
        self._ranks = ranks
        self._leave = leave
        self.model: Model = own.model
        self.vocab_size = own.vocab_size
        self.max_model_len = own.max_model_len
        self.end_token_ids = own.end_token_ids

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer."""
        return self._own.tokenizer

    @property
    def watch(self) -> CompileWatch | None:
        """Rank 0's."""
        return self._own.watch

    @property
    def keeps(self) -> bool:
        """See TorchExecutor."""
        return self._own.keeps

    @keeps.setter
    def keeps(self, keeps: bool) -> None:
        self._own.keeps = keeps

    @property
    def at_end(self) -> Callable[[], object] | None:
        """See TorchExecutor."""
        return self._own.at_end

    @at_end.setter
    def at_end(self, at_end: Callable[[], object] | None) -> None:
        self._own.at_end = at_end

    def renew(self, query: ExecutorQuery) -> bool:
        """See TorchExecutor."""
        device = torch.device(self.model.device)
        return not self._ranks.lost and self._own.renew(per_rank(query, device, self._ranks.size))

    def measure_pool(self, layout: PoolLayout) -> int:
        """See core.protocols.Executor: of the rank that has least room."""
        tokens: list[int] = self._all("measure_pool", self._own.measure_pool, layout)
        return min(tokens)

    def prepare(self, layout: PoolLayout) -> None:
        """See core.protocols.Executor: on all ranks."""
        self._all("prepare", self._own.prepare, layout)

    def launch(self, launch: Launch) -> None:
        """Start a launch on all ranks. Raises RankError where one is lost or cannot make it: no
        launch fails alone here."""
        self._ranks.tell(launch)
        with self._ranks.explained():
            self._own.launch(launch)

    def collect(self) -> LaunchResult:
        """Wait for the oldest launch. Raises RankError if a rank is lost meanwhile."""
        if not self._own.ready():
            self._wait()
        with self._ranks.explained():
            return self._own.collect()

    def check(self) -> None:
        """Raise RankError if a rank is lost, also while nothing is in flight."""
        self._ranks.check()

    def describe(self) -> dict[str, Any]:
        """As a TorchExecutor, of rank 0; and the number of ranks."""
        return self._own.describe() | {"tensor_parallel": self._ranks.size}

    def close(self) -> None:
        """Release the pool and end the other ranks, unless all is kept."""
        self._own.keeps &= not self._ranks.lost
        self._own.close()
        if not self._own.keeps:
            gc.collect()  # NCCL lets go of a communicator only after the graphs that use it
            self._ranks.close()
            if self._leave is not None:
                leaving = Thread(target=self._leave, name="leave ranks", daemon=True)
                leaving.start()
                leaving.join(GRACE_S)

    def _wait(self) -> None:
        """Not in the driver, which would wait for a lost rank's part of a collective for ever."""
        until_s = time.monotonic() + TIMEOUT_S
        while not self._own.ready():
            self._ranks.check()
            if time.monotonic() > until_s:
                raise RankError(f"tensor-parallel ranks did not end a launch within {TIMEOUT_S} s")
            time.sleep(0)  # other threads may want the interpreter

    def _all(self, name: str, call: Callable[[PoolLayout], Any], layout: PoolLayout) -> list[Any]:
        try:
            self._ranks.tell((name, layout))
            with self._ranks.explained():
                own = call(layout)
            return [own, *self._ranks.replies()]
        except BaseException:  # the others may wait in a collective
            self._ranks.close(at_once=True)
            raise


def lead(
    runner: Runner, query: ExecutorQuery, size: int, shares_cores: bool = False
) -> ParallelExecutor:
    """Start the other ranks, load, and meet them. shares_cores: on a CPU. Raises ConfigError for a
    model that is not cut into `size`, for parts that do not pickle, and for too few devices."""
    ranks = Ranks.start(size, run_rank)
    try:
        model: Any = query.model()
        check_shards(model, size)
        device = torch.device(model.device)
        query = per_rank(query, device, size)
        if shares_cores and device.type == "cpu":  # threads that wait for a core spin
            share = max(1, (os.cpu_count() or 1) // size)
            torch.set_num_threads(min(share, torch.get_num_threads()))
        setup = RankSetup(
            shards=model.shards,
            runner=runner,
            engine=query.engine,
            seed=query.seed,
            clock=query.clock,
            attention=query.attention,
            device_type=_checked(device, size),
            folder=ranks.folder,
            num_threads=torch.get_num_threads(),
        )
        ranks.send_bytes(packed(setup, FIELD))
        ranks.replies()
        ranks.tell(None)
        own = setup.executor(model, 0, query.progress)
        group = own.group
        assert isinstance(group, DistributedGroup), "just connected"
        ranks.on_loss(group.abort)
        return ParallelExecutor(own, ranks, group.abort)
    except BaseException:
        ranks.close(at_once=True)
        raise


def per_rank(query: ExecutorQuery, device: torch.device, size: int) -> ExecutorQuery:
    """The query as each rank sees it: on a CPU all share one memory."""
    if device.type != "cpu":
        return query
    engine = replace(query.engine, memory_share=query.engine.memory_share / size)
    return replace(query, engine=engine)


def _checked(device: torch.device, size: int) -> str:
    if device.type == "cuda":
        require(not device.index, "device", f"cuda where {FIELD} is {size}", str(device))
        count = torch.cuda.device_count()
        require(size <= count, FIELD, f"<= {count}, the number of CUDA devices", size)
    return device.type
