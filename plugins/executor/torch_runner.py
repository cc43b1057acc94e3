"""Runs launches with torch, on a CPU or a CUDA device: paged KV pool, packed inputs, sampling in
place.

Nothing in `launch` waits for the device: inputs travel in one packed copy, a sampled token that the
next launch needs stays on the device, and results come back through pinned memory when `collect`
asks."""

import platform
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.clock import Clock
from core.config import require
from core.errors import InvariantError
from core.hookspecs import hookimpl
from core.launch import Launch, LaunchResult, PoolLayout
from core.protocols import AttentionBackend, AttentionBatch, Model
from core.queries import AttentionQuery, ExecutorQuery
from plugins.executor.attend import LaunchAttention
from plugins.executor.logprobs import score
from plugins.executor.packing import PackedLaunch, pack
from plugins.executor.paging import Paging, TorchPaging
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.pool import FLOAT8, KVPool
from plugins.executor.results import InFlight
from plugins.executor.rows import SamplingRows
from plugins.executor.sampler import SamplePlan, plan_samples, sample
from plugins.executor.sampling import SamplingKernels
from plugins.executor.upload import download, upload

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": FLOAT8,
}
MAX_IN_FLIGHT = 2


@dataclass(slots=True, eq=False)
class DeviceState:
    """What `prepare` allocates."""

    pool: KVPool
    rows: SamplingRows
    penalties: PenaltyCounts
    backend: AttentionBackend


class TorchRunner:
    """The plugin. dtype: of the KV pool, "auto" = the model's. num_threads: torch's CPU threads in
    this process, None = leave them. k_scale, v_scale: a float8 pool holds K / k_scale and V /
    v_scale. paging: a plugins.executor.paging.Paging, None = torch. sampling: a
    plugins.executor.sampling.SamplingKernels, None = torch."""

    def __init__(
        self,
        dtype: str = "auto",
        num_threads: int | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        paging: Any = None,
        sampling: Any = None,
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

    @hookimpl
    def build_executor(self, query: ExecutorQuery) -> "TorchExecutor":
        """The executor, with the model loaded; the pool waits for `prepare`."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        model: Model = query.model()
        dtype = model.dtype if self._dtype == "auto" else DTYPES[self._dtype]
        return TorchExecutor(model, dtype, query, self._scales, self._paging, self._sampling)


class TorchExecutor:
    """core.protocols.Executor over a core.protocols.Model."""

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype,
        query: ExecutorQuery,
        scales: tuple[float, float] = (1.0, 1.0),
        paging: Paging | None = None,
        sampling: SamplingKernels | None = None,
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.end_token_ids = model.end_token_ids
        self.device = torch.device(model.device)
        self._dtype = dtype
        self._scales = scales
        self._paging: Paging = paging or TorchPaging()
        self._sampling = sampling
        self._build_attention = query.attention
        self._clock: Clock = query.clock
        self._state: DeviceState | None = None
        self._in_flight: deque[InFlight] = deque()
        self._side: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._fault = (
            "logits must be finite but for masked tokens, with one left; got NaN, +inf or -inf"
            f" alone (model {_name(model.dtype)}, KV {_name(dtype)}; is either narrower than the"
            " weights were trained in?)"
        )

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer."""
        return self.model.tokenizer

    def prepare(self, layout: PoolLayout) -> None:
        """Build the attention backend, allocate everything, and run one token through the model, so
        that the first request does not pay for the libraries' start. Raises ConfigError for a
        misfit."""
        model = self.model
        backend = self._build_attention(
            AttentionQuery(
                num_q_heads=model.num_q_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                dtype=_name(model.dtype if self._dtype == FLOAT8 else self._dtype),
                kv_dtype=_name(self._dtype),
                page_size=layout.page_size,
                device=str(self.device),
                k_scale=self._scales[0],
                v_scale=self._scales[1],
            )
        )
        shape = (model.num_layers, model.num_kv_heads, model.head_dim)
        self._state = DeviceState(
            pool=KVPool(layout, *shape, self._dtype, self.device, *self._scales),
            rows=SamplingRows(layout.num_rows, self.vocab_size),
            penalties=PenaltyCounts(layout.num_rows, self.vocab_size, self.device),
            backend=backend,
        )
        self.launch(_warm_up_launch())
        self.collect()

    @torch.inference_mode()
    def launch(self, launch: Launch) -> None:
        """Start a launch. Raises InvariantError before `prepare` and for a third one in flight."""
        state = self._prepared()
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise InvariantError(f"at most {MAX_IN_FLIGHT} launches in flight, got one more")
        for setup in launch.setups:
            state.rows.set(setup)
        penalised = [setup for setup in launch.setups if state.rows.penalised[setup.row]]
        if penalised:
            state.penalties.reset(penalised)
        packed = pack(launch, state.rows)
        sampled = _sampled(launch, state.rows)
        samples = plan_samples(state.rows, *sampled, for_kernels=self._sampling is not None)
        inputs = upload(packed.arrays | samples.arrays, self.device)
        logits = self._forward(launch, packed, inputs)
        self._finish(launch, packed, samples, inputs, logits)

    def collect(self) -> LaunchResult:
        """Wait for the oldest launch. Raises InvariantError if there is none."""
        if not self._in_flight:
            raise InvariantError("collect needs a launch in flight, got none")
        return self._in_flight.popleft().wait(self._clock)

    def describe(self) -> dict[str, Any]:
        """Device, types, versions, threads, pool and attention backend, for the manifest."""
        facts = {
            "executor": "torch",
            "model": self.model.name,
            "device": str(self.device),
            "device_name": _device_name(self.device),
            "model_dtype": _name(self.model.dtype),
            "kv_dtype": _name(self._dtype),
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "sampling": "torch" if self._sampling is None else self._sampling.describe(),
        }
        if self._state is not None:
            facts["kv_pool_bytes"] = self._state.pool.kv.nbytes
            facts["attention"] = self._state.backend.describe()
        return facts

    def close(self) -> None:
        """Forget what is in flight and release the pool."""
        self._in_flight.clear()
        self._state = None

    def _prepared(self) -> DeviceState:
        if self._state is None:
            raise InvariantError("launch needs prepare to have been called")
        return self._state

    def _forward(self, launch: Launch, packed: PackedLaunch, inputs: dict[str, Tensor]) -> Tensor:
        state = self._prepared()
        pool = state.pool
        self._paging.update(pool.table, inputs["reset_rows"], inputs["updates"])
        token_ids, positions = inputs["token_ids"], inputs["positions"]
        if launch.feedback.any():
            token_ids[inputs["feedback_at"]] = pool.last_tokens[inputs["feedback_rows"]]
        step = self._paging.step(
            pool.table,
            inputs["row_ids"],
            inputs["context_lens"],
            inputs["query_starts"],
            inputs["token_rows"],
            positions,
            pool.page_size,
        )
        batch = AttentionBatch(
            page_table=step.page_table,
            context_lens=step.context_lens,
            query_starts=step.query_starts,
            host_context_lens=packed.context_lens,
            host_query_lens=packed.query_lens,
            num_decode_rows=launch.num_decode_rows,
            page_size=pool.page_size,
        )
        plan = state.backend.plan(batch)
        split = launch.num_decode_rows
        attend = LaunchAttention(pool, state.backend, step.slots, plan, split, self._side)
        logits: Tensor = self.model.forward(token_ids, positions, attend, inputs["logits_rows"])
        return logits[:, : self.vocab_size]  # padding of the head is never scored or sampled

    def _finish(
        self,
        launch: Launch,
        packed: PackedLaunch,
        samples: SamplePlan,
        inputs: dict[str, Tensor],
        logits: Tensor,
    ) -> None:
        """Sample, score the prompts that asked, and send the results towards the host."""
        state, scores = self._prepared(), packed.scores
        first, kernels = logits[: samples.num_rows], self._sampling
        drawn = sample(first, samples, inputs, state.penalties, kernels)
        # The next launch may read a row's mark as a token before the host knows that it failed.
        state.pool.last_tokens[inputs["sampled_rows"]] = drawn.tokens.clamp(min=0)
        entries = None
        if scores is not None:
            rest = logits[samples.num_rows :]
            entries = score(rest, inputs["score_targets"], max(scores.num_top), kernels)
        tokens = download(drawn.tokens)
        event = None
        if self.device.type == "cuda":
            event = torch.Event(self.device)
            event.record()
        done_s = self._clock.now() if event is None else None
        self._in_flight.append(
            InFlight(
                launch_id=launch.launch_id,
                tokens=tokens,
                sampled=np.flatnonzero(launch.samples),
                fault=self._fault,
                samples=samples,
                logprobs=drawn.logprobs,
                scores=scores,
                score_entries=entries,
                event=event,
                finished_s=done_s,
            )
        )


def _sampled(launch: Launch, rows: SamplingRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that sample, and the output position each draws for."""
    row_ids = launch.row_ids[launch.samples].astype(np.int64)
    ends = (launch.first_positions + launch.num_tokens)[launch.samples]
    return row_ids, ends - rows.prompt_len[row_ids]


def _warm_up_launch() -> Launch:
    """One token in row 0, stored on the reserved page; it samples nothing."""
    return Launch(
        launch_id=-1,
        row_ids=np.zeros(1, np.int32),
        first_positions=np.zeros(1, np.int32),
        num_tokens=np.ones(1, np.int32),
        token_ids=np.zeros(1, np.int32),
        feedback=np.zeros(1, np.bool_),
        samples=np.zeros(1, np.bool_),
        num_decode_rows=1,
        table_updates=np.empty((0, 3), np.int32),
        setups=(),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
