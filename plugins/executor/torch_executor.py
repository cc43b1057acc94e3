"""An executor with torch, on a CPU or a CUDA device: what it makes before the first request, and
the launches in flight, which plugins/executor/launch_starter.py starts."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from core.clock import Clock
from core.config import require
from core.errors import InvariantError
from core.launch import Launch, LaunchResult, PoolLayout
from core.queries import ExecutorQuery
from plugins.executor import pool_size
from plugins.executor.capture import capture_graphs, graph_facts, num_graphs
from plugins.executor.compile_watch import CompileWatch
from plugins.executor.device_state import (
    DeviceState,
    allocate,
    attention_query,
    device_name,
    dtype_name,
)
from plugins.executor.faults import explained, fails_alone, launch_error
from plugins.executor.graphs import LARGEST, Capture, CudaCapture, why_not
from plugins.executor.launch_starter import LaunchStarter
from plugins.executor.paging import Paging, TorchPaging
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.pool import kv_page_bytes
from plugins.executor.results import InFlight, no_token
from plugins.executor.sampling import SamplingKernels
from plugins.executor.shape import model_shape
from plugins.executor.sharing import SharedPages
from plugins.executor.warm_up import SAMPLED, warm_up_decodes, warm_up_launches
from plugins.shared.model_protocols import AttentionBackend, Model, RankGroup

MAX_IN_FLIGHT = 2


class TorchExecutor:
    """core.protocols.Executor over a model_protocols.Model."""

    computes = True

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype,
        query: ExecutorQuery,
        scales: tuple[float, float] = (1.0, 1.0),
        paging: Paging | None = None,
        sampling: SamplingKernels | None = None,
        graphs: str = "auto",
        capture: Capture | None = None,
        record_plan: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        """capture: for launches of one-token rows on any device, None = as CUDA graphs. group: the
        ranks of a model that is cut. The rest as TorchRunner's."""
        self.model = model
        self.group = group
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.end_token_ids = model.end_token_ids
        self.device = torch.device(model.device)
        self._dtype = dtype
        self._scales = scales
        self._paging: Paging = paging or TorchPaging()
        fault = no_token(dtype_name(model.dtype), dtype_name(dtype))
        self._starter = LaunchStarter(self.device, query.clock, self._paging, sampling, fault)
        self._sampling = sampling
        self._build_attention = query.attention
        self._graphs = graphs
        self._capture = capture
        self._record_plan = record_plan
        self._max_rows = min(LARGEST, query.engine.max_num_seqs)
        self._engine, self._seed = query.engine, query.seed
        self.keeps = False  # when it is closed, for a later `renew`
        self.at_end: Callable[[], object] | None = None  # called when it is closed and not kept
        self.engines_before = 0
        self._layout: PoolLayout | None = None
        self._backend: AttentionBackend | None = None
        self._pool_size: pool_size.PoolSize | None = None
        self._progress = query.progress
        self._clock: Clock = query.clock
        self._state: DeviceState | None = None
        self._in_flight: deque[InFlight] = deque()
        self.watch: CompileWatch | None = None
        self._side: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def renew(self, query: ExecutorQuery) -> bool:
        """Serve another engine with the same model, pool and graphs, if it has the same settings,
        and seed or a model that draws its weights anew in place. False: it cannot."""
        if not self.keeps or query.engine != self._engine or not self._seeded(query.seed):
            return False
        self._clock, self._progress = query.clock, query.progress
        self._starter = replace(self._starter, clock=query.clock)
        self.engines_before += 1
        return True

    def _seeded(self, seed: int) -> bool:
        reseed = getattr(self.model, "reseed", None)
        if seed != self._seed:
            if reseed is None or self.group is not None:
                return False
            reseed(seed)
            self._seed = seed
        return True

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer."""
        return self.model.tokenizer

    def measure_pool(self, layout: PoolLayout) -> int:
        """See core.protocols.Executor. On a CUDA device from its largest launches, on a CPU from
        the memory that is free (plugins/executor/pool_size.py)."""
        if self._fits(layout) and self._pool_size is not None:
            return self._pool_size.num_tokens
        self._forget()
        if self.device.type == "cuda":
            budget = self._measured(replace(layout, num_pages=1))
        else:
            budget = pool_size.cpu_budget(self._engine.memory_share)
        shape = self.model.num_layers, self.model.num_kv_heads, self.model.head_dim
        page_bytes = kv_page_bytes(layout.page_size, *shape, self._dtype)
        self._pool_size = pool_size.fit_pool(budget, layout, page_bytes)
        if self._progress:
            sys.stderr.write(f"{self._pool_size}\n")
        return self._pool_size.num_tokens

    def prepare(self, layout: PoolLayout) -> None:
        """Build the attention backend, allocate everything, compute what the first request would
        else pay for (plugins/executor/warm_up.py), and capture graphs. Raises ConfigError for a
        misfit, and for memory that runs out."""
        compiles = self.device.type == "cuda"
        if self._fits(layout) and self._layout == layout:
            state = self._prepared()
            if state.sharing is not None:
                state.sharing = SharedPages(layout.num_rows, layout.page_size)
            self.watch = CompileWatch() if compiles else None
            return
        if self._layout is not None:
            self._forget()
        rule = "lower engine.pool_tokens, or let auto measure it"
        with explained(f"the KV pool of {layout.num_pages * layout.page_size:,} slots", rule):
            state = self._state = self._allocate(layout)
            state.penalties = PenaltyCounts(len(SAMPLED), self.vocab_size, self.device)
            if state.padding is not None:
                state.padding.meet(self.model, layout.num_rows)
            self._run(warm_up_launches(layout, self.max_model_len, compiles))
            state.penalties = PenaltyCounts(layout.num_rows, self.vocab_size, self.device)
        rule = "lower engine.pool_tokens or engine.memory_share, or set executor.graphs=off"
        with explained("CUDA graphs", rule):
            self._make_graphs(state, layout)
        if compiles and state.sharing is not None and not state.graphs:  # capturing met its forms
            state.sharing.forced = True
            self._run(warm_up_decodes(layout))
            state.sharing.forced = False
        self.watch = CompileWatch() if compiles else None
        self._layout = layout

    def launch(self, launch: Launch) -> None:
        """Start a launch. Raises LaunchError if memory runs out or arguments are refused, and
        InvariantError before `prepare` and for a third launch in flight."""
        try:
            return self._start(launch)
        except Exception as error:
            if not fails_alone(error):
                raise
            failed = launch_error(error, launch, self.device)
        raise failed  # out here, where no traceback keeps the launch's tensors

    @torch.inference_mode()
    def _start(self, launch: Launch) -> None:
        state = self._prepared()
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise InvariantError(f"at most {MAX_IN_FLIGHT} launches in flight, got one more")
        self._in_flight.append(self._starter.start(launch, state))

    def collect(self) -> LaunchResult:
        """Wait for the oldest launch. Raises InvariantError if there is none."""
        if not self._in_flight:
            raise InvariantError("collect needs a launch in flight, got none")
        return self._in_flight.popleft().wait(self._clock)

    def ready(self) -> bool:
        """Whether `collect` would not wait."""
        event = self._in_flight[0].event if self._in_flight else None
        return event is None or bool(event.query())

    def describe(self) -> dict[str, Any]:
        """Device, types, versions, threads, pool and attention backend, for the manifest."""
        facts: dict[str, Any] = {
            "executor": "torch",
            "model": self.model.name,
            "shape": model_shape(self.model),
            "device": str(self.device),
            "device_name": device_name(self.device),
            "model_dtype": dtype_name(self.model.dtype),
            "kv_dtype": dtype_name(self._dtype),
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "engines_before": self.engines_before,
            "sampling": "torch" if self._sampling is None else self._sampling.describe(),
        }
        if hasattr(self.model, "describe"):
            facts |= self.model.describe(self._dtype)
        if self._state is not None:
            state = self._state
            facts["kv_pool_bytes"] = state.pool.kv.nbytes
            facts["kv_pool_auto"] = self._pool_size and self._pool_size.describe()
            facts["attention"] = state.forward.backend.describe()
            facts["graphs"] = graph_facts(state)
        return facts

    def close(self) -> None:
        """Forget what is in flight and release the pool, unless it is kept."""
        if self.watch is not None:
            self.watch.close()
        while self.keeps and self._in_flight:
            self.collect()
        self._in_flight.clear()
        if not self.keeps:
            self._forget()
            if self.at_end is not None:
                self.at_end()

    def _fits(self, layout: PoolLayout) -> bool:
        """Whether what is there has this layout, whatever the number of pages."""
        old = self._layout
        return old is not None and replace(layout, num_pages=old.num_pages) == old

    def _forget(self) -> None:
        self._state = self._layout = self._backend = None

    def _allocate(self, layout: PoolLayout) -> DeviceState:
        model, kv = self.model, (self._dtype, self._scales)
        if self._backend is None:  # once: it knows the size of a page, not that of the pool
            self._backend = self._build_attention(attention_query(model, layout.page_size, *kv))
        parts = self._backend, self._paging, *kv, self._side, self._record_plan
        return allocate(layout, model, *parts, self.group)

    def _run(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            self._start(launch)
            self.collect()

    def _measured(self, layout: PoolLayout) -> pool_size.Budget:
        seqs, rows = self._engine.max_num_seqs, min(self._max_rows, layout.num_rows)
        rule = "lower engine.max_num_batched_tokens or engine.max_num_seqs"
        with explained("engine.pool_tokens=auto: the largest launches", rule):
            self._state = self._allocate(layout)
            no_graphs = self._why_no_graphs(self._state.forward.backend)
            budget = pool_size.cuda_budget(
                self.device,
                self._engine.memory_share,
                self._run,
                pool_size.largest_launches(layout, seqs, self.max_model_len),
                0 if no_graphs else rows,
                num_graphs(self._state, self.model, rows),
                hasattr(self.model, "enter"),
            )
        self._state = None
        return budget

    def _prepared(self) -> DeviceState:
        if self._state is None:
            raise InvariantError("launch needs prepare to have been called")
        return self._state

    def _make_graphs(self, state: DeviceState, layout: PoolLayout) -> None:
        kernels = self._sampling
        state.why_not = self._why_no_graphs(state.forward.backend)
        possible = self._graphs != "on" or not state.why_not
        require(possible, "executor.graphs", f"auto or off where {state.why_not}", "on")
        if state.why_not or kernels is None:
            return
        # Other threads, such as NCCL's own, must not break a capture of collectives.
        mode = "global" if self.group is None else "thread_local"
        capture = self._capture or CudaCapture(self.device, mode)
        largest = min(self._max_rows, layout.num_rows)
        capture_graphs(state, self.model, kernels, largest, capture, self._progress)

    def _why_no_graphs(self, backend: AttentionBackend) -> str:
        if self._graphs == "off":
            return "off"
        if self._record_plan:
            return "executor.record_plan reads every launch's plan"
        device = "cuda" if self._capture else self.device.type
        return why_not(device, self._sampling, backend.describe()) or ""
