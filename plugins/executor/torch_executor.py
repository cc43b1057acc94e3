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
from core.launch import Launch, LaunchResult, PoolLayout
from core.protocols import AttentionBackend, Model
from core.queries import AttentionQuery, ExecutorQuery
from plugins.executor.forward import Forward
from plugins.executor.graphs import LARGEST, Capture, CudaCapture, DecodeGraphs, why_not
from plugins.executor.logprobs import Entries, score
from plugins.executor.packing import PackedLaunch, PromptScores, pack, table_arrays
from plugins.executor.paging import Paging, TorchPaging
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.pool import FLOAT8, KVPool
from plugins.executor.results import InFlight
from plugins.executor.rows import SamplingRows
from plugins.executor.sampler import SamplePlan, plan_samples, sample
from plugins.executor.sampling import SamplingKernels
from plugins.executor.upload import download, upload
from plugins.executor.warm_up import warm_up_chunks, warm_up_launch

MAX_IN_FLIGHT = 2


@dataclass(slots=True, eq=False)
class DeviceState:
    """What `prepare` makes. graphs: None where they cannot be or are not wanted, and why_not says
    so."""

    pool: KVPool
    rows: SamplingRows
    penalties: PenaltyCounts
    forward: Forward
    graphs: DecodeGraphs | None = None
    why_not: str = ""


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
        graphs: str = "auto",
        capture: Capture | None = None,
    ) -> None:
        """capture: for launches of one-token rows on any device, None = as CUDA graphs. The rest as
        TorchRunner's."""
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
        self._graphs = graphs
        self._capture = capture
        self._max_rows = min(LARGEST, query.engine.max_num_seqs)
        self._progress = query.progress
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
        """Build the attention backend, allocate everything, compute what the first request would
        else pay for (plugins/executor/warm_up.py), and capture graphs. Raises ConfigError for a
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
        pool = KVPool(layout, *shape, self._dtype, self.device, *self._scales)
        self._state = DeviceState(
            pool=pool,
            rows=SamplingRows(layout.num_rows + 1, self.vocab_size),
            penalties=PenaltyCounts(layout.num_rows, self.vocab_size, self.device),
            forward=Forward(model, pool, backend, self._paging, self._side),
        )
        chunks = warm_up_chunks(layout, self.max_model_len) if self.device.type == "cuda" else []
        for first, count in [(0, 1), *chunks]:
            self.launch(warm_up_launch(first, count))
            self.collect()
        self._make_graphs(self._state, layout)

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
        graphs = state.graphs
        if graphs is not None and graphs.takes(launch, state.rows):
            self._replay(graphs, launch, state)
        else:
            self._compute(launch, state)

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
            state = self._state
            facts["kv_pool_bytes"] = state.pool.kv.nbytes
            facts["attention"] = state.forward.backend.describe()
            sizes = [] if state.graphs is None else state.graphs.sizes
            facts["graphs"] = {"sizes": sizes, "why_not": state.why_not}
        return facts

    def close(self) -> None:
        """Forget what is in flight and release the pool."""
        self._in_flight.clear()
        self._state = None

    def _prepared(self) -> DeviceState:
        if self._state is None:
            raise InvariantError("launch needs prepare to have been called")
        return self._state

    @torch.inference_mode()
    def _make_graphs(self, state: DeviceState, layout: PoolLayout) -> None:
        kernels = self._sampling
        state.why_not = self._why_no_graphs(state.forward.backend)
        possible = self._graphs != "on" or not state.why_not
        require(possible, "executor.graphs", f"auto or off where {state.why_not}", "on")
        if state.why_not or kernels is None:
            return
        graphs = DecodeGraphs(
            lambda inputs: state.forward.decode(inputs, kernels),
            min(self._max_rows, layout.num_rows),
            state.pool.pad_row,
            self.device,
            self._capture or CudaCapture(self.device),
        )
        graphs.capture(state.rows, self._progress)
        state.graphs = graphs

    def _why_no_graphs(self, backend: AttentionBackend) -> str:
        if self._graphs == "off":
            return "off"
        device = "cuda" if self._capture else self.device.type
        return why_not(device, self._sampling, backend.describe()) or ""

    def _replay(self, graphs: DecodeGraphs, launch: Launch, state: DeviceState) -> None:
        updated = not graphs.fits(launch)
        if updated:
            self._update_table(upload(table_arrays(launch), self.device), state)
        tokens, size = graphs.run(launch, state.rows, updated)
        self._send(launch, tokens, size)

    def _compute(self, launch: Launch, state: DeviceState) -> None:
        packed = pack(launch, state.rows)
        sampled = _sampled(launch, state.rows)
        samples = plan_samples(state.rows, *sampled, for_kernels=self._sampling is not None)
        inputs = upload(packed.arrays | samples.arrays, self.device)
        self._update_table(inputs, state)
        token_ids, last_tokens = inputs["token_ids"], state.pool.last_tokens
        if launch.feedback.any():
            token_ids[inputs["feedback_at"]] = last_tokens[inputs["feedback_rows"]]
        lens = packed.context_lens, packed.query_lens
        logits = state.forward.logits(token_ids, inputs, *lens, launch.num_decode_rows)
        self._finish(launch, packed, samples, inputs, logits)

    def _update_table(self, inputs: dict[str, Tensor], state: DeviceState) -> None:
        self._paging.update(state.pool.table, inputs["reset_rows"], inputs["updates"])

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
        state.forward.keep(inputs["sampled_rows"], drawn.tokens)
        entries = None
        if scores is not None:
            rest = logits[samples.num_rows :]
            entries = score(rest, inputs["score_targets"], max(scores.num_top), kernels)
        self._send(launch, drawn.tokens, 0, samples, drawn.logprobs, scores, entries)

    def _send(
        self,
        launch: Launch,
        tokens: Tensor,
        graph_rows: int,
        samples: SamplePlan | None = None,
        logprobs: Entries | None = None,
        scores: PromptScores | None = None,
        score_entries: Entries | None = None,
    ) -> None:
        """Results on their way to the host: see InFlight."""
        on_host = download(tokens)
        event = None
        if self.device.type == "cuda":
            event = torch.Event(self.device)
            event.record()
        self._in_flight.append(
            InFlight(
                launch_id=launch.launch_id,
                tokens=on_host,
                sampled=np.flatnonzero(launch.samples),
                fault=self._fault,
                samples=samples,
                logprobs=logprobs,
                scores=scores,
                score_entries=score_entries,
                event=event,
                finished_s=self._clock.now() if event is None else None,
                graph_rows=graph_rows,
            )
        )


def _sampled(launch: Launch, rows: SamplingRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that sample, and the output position each draws for."""
    row_ids = launch.row_ids[launch.samples].astype(np.int64)
    ends = (launch.first_positions + launch.num_tokens)[launch.samples]
    return row_ids, ends - rows.prompt_len[row_ids]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
