"""Ranks of a model as threads of this process: what a test asks costs no new interpreter."""

import threading
from functools import partial
from multiprocessing import Pipe

import torch

from core.config import EngineConfig
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.queries import ExecutorQuery, ModelQuery
from kernels.torch_reference import paged_decode, paged_extend
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.attention.paged import PagedAttention
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.parallel_executor import ParallelExecutor, per_rank
from plugins.executor.parallel_rank import RankSetup, follow
from plugins.executor.parallel_ranks import Ranks
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from tests.patience import SOON_S


class Threads:
    """The plugin of an executor whose ranks other than the first are threads. runner: as
    parallel_rank.Runner. executors: of those ranks, once they have one."""

    def __init__(self, runner=None):
        self.runner = runner or TorchRunner()
        self.threads, self.executors = [], {}

    @hookimpl
    def build_executor(self, query):
        return self.over(query.model(), query)

    def over(self, model, query):
        size = model.shards.num_ranks
        query = per_rank(query, torch.device("cpu"), size)
        pipes = [Pipe() for _ in range(1, size)]
        ranks = Ranks([ours for ours, _ in pipes])
        setup = RankSetup(
            model.shards, self.runner, query.engine, query.seed, query.clock, query.attention,
            "cpu", ranks.folder, 1,
        )  # fmt: skip
        for rank, (_, theirs) in enumerate(pipes, 1):
            thread = threading.Thread(target=self._follow, args=(setup, rank, theirs), daemon=True)
            thread.start()
            self.threads.append(thread)
        return ParallelExecutor(setup.executor(model, 0), ranks)

    def join(self):
        """Wait for the threads of executors that were closed."""
        for thread in self.threads:
            thread.join(SOON_S)
            assert not thread.is_alive()

    def _follow(self, setup, rank, connection):
        executor = setup.executor(setup.shards.build(rank, "cpu"), rank)
        self.executors[rank] = executor
        with connection:
            follow(executor, connection)


def load(folder, size=1):
    """A checkpoint as a model, of `size` parts the first."""
    loader = HuggingFaceModel(path=str(folder), tensor_parallel=size)
    return loader.build_model(ModelQuery("cpu", 0, False))


def hooks(model, runner, slice_tokens=16, attention=None):
    """Plugins of an engine with a prefix cache. model, runner, attention: plugins."""
    plugins = [Fcfs(), PromptFits(growth_share=0), Chunked(slice_tokens=slice_tokens)]
    plugins += [LastAdmitted(), Paged(4), Radix(), Lru(), AdmitAll(), MaxTokensShare(), Fixed()]
    plugins += [attention or PagedAttention(paged_decode, paged_extend), model, runner]
    return Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})


def settings(pool_tokens=2048, **changes):
    """Of an engine whose launches overlap."""
    fixed = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 256}
    given = fixed | {"pool_tokens": pool_tokens, "overlap": True, "strict": True} | changes
    return EngineConfig(**given)


def executor_query(model, decode=paged_decode, **changes):
    """For an executor without an engine."""
    attention = partial(PagedAttention(decode, paged_extend).build_attention)
    return ExecutorQuery(settings(**changes), 0, RealClock(), lambda: model, attention)
