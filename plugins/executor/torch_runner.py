"""The plugin of the torch executor (torch_executor.py)."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch

from core.config import require
from core.hookspecs import hookimpl
from core.queries import ExecutorQuery
from plugins.executor.deterministic import check_model, checked
from plugins.executor.pool import FLOAT8
from plugins.executor.torch_executor import TorchExecutor
from plugins.shared.model_protocols import Model, RankGroup, check_shards

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": FLOAT8,
}
GRAPHS = ("auto", "on", "off")
FIELD = "executor.tensor_parallel"

if TYPE_CHECKING:
    from plugins.executor.parallel_executor import ParallelExecutor

    BuiltExecutor = TorchExecutor | ParallelExecutor


class TorchRunner:
    """The plugin. dtype: of the KV pool, "auto" = the model's. num_threads: torch's CPU threads in
    this process, None = leave them, or of several ranks each its share. k_scale, v_scale: a float8
    pool holds K / k_scale and V / v_scale. paging: a plugins.executor.paging.Paging, None = torch.
    sampling: a plugins.executor.sampling.SamplingKernels, None = torch. graphs: launches of
    one-token rows and small others as CUDA graphs, of larger ones what lies between attentions;
    auto = where device and kernels allow it, on = refuse to start where they do not for the first.
    record_plan: read what attention planned into each step's record; waits for the device at every
    launch, and does without graphs. tensor_parallel: devices, or processes on a CPU, that compute a
    decoder together (plugins/executor/parallel_executor.py); device r for rank r."""

    def __init__(
        self,
        dtype: str = "auto",
        num_threads: int | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        paging: Any = None,
        sampling: Any = None,
        graphs: str = "auto",
        record_plan: bool = False,
        tensor_parallel: int = 1,
    ) -> None:
        rule = f"auto or one of {', '.join(DTYPES)}"
        require(dtype == "auto" or dtype in DTYPES, "executor.dtype", rule, dtype)
        holds = num_threads is None or num_threads >= 1
        require(holds, "executor.num_threads", ">= 1 or null", num_threads)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            require(scale > 0, f"executor.{name}", "> 0", scale)
            holds = scale == 1.0 or dtype == "float8_e4m3fn"
            require(holds, f"executor.{name}", "1 unless executor.dtype is float8_e4m3fn", scale)
        self._dtype = dtype
        self._num_threads = num_threads
        self._scales = (k_scale, v_scale)
        self._paging = paging
        self._sampling = sampling
        require(graphs in GRAPHS, "executor.graphs", f"one of {', '.join(GRAPHS)}", graphs)
        self._graphs = graphs
        self._record_plan = record_plan
        require(tensor_parallel >= 1, FIELD, ">= 1", tensor_parallel)
        self.tensor_parallel = tensor_parallel
        self._keeps = False
        self._kept: BuiltExecutor | None = None

    def keep_built(self) -> None:
        """From now on the executor stays as it is when its engine ends, for the next engine with
        the same settings; see TorchExecutor.renew."""
        self._keeps = True

    @hookimpl
    def build_executor(self, query: ExecutorQuery) -> "BuiltExecutor":
        """The executor, with the model loaded; the pool waits for `prepare`. Raises ConfigError for
        what cannot be deterministic where engine.deterministic is set, and for what cannot be
        computed by so many devices."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.renew(query):
            self._kept = kept
            return kept
        del kept  # with its memory, before the next model is loaded
        before = torch.get_num_threads()
        try:
            executor = self._built(query)
        except BaseException:
            torch.set_num_threads(before)
            raise
        # The process may go on to another engine: closed or, if kept, let go, it leaves no trace.
        executor.at_end = finalize(executor, torch.set_num_threads, before)
        executor.keeps = self._keeps
        self._kept = executor if self._keeps else None
        return executor

    def _built(self, query: ExecutorQuery) -> "BuiltExecutor":
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        if self.tensor_parallel > 1:
            # Imported here: one device needs no torch.distributed.
            from plugins.executor.parallel_executor import lead

            return lead(self, query, self.tensor_parallel, self._num_threads is None)
        model: Model = query.model()
        check_shards(model, 1)
        return self.over(model, query)

    def over(
        self, model: Model, query: ExecutorQuery, group: RankGroup | None = None
    ) -> TorchExecutor:
        """An executor over a loaded model. group: of the ranks, if it is one's part of a model."""
        if query.engine.deterministic:
            check_model(model, self._sampling)
            query = replace(query, attention=checked(query.attention))
        dtype = model.dtype if self._dtype == "auto" else DTYPES[self._dtype]
        kernels = self._paging, self._sampling
        options: dict[str, Any] = {"graphs": self._graphs, "record_plan": self._record_plan}
        return TorchExecutor(model, dtype, query, self._scales, *kernels, **options, group=group)
