"""Starts launches over what an executor keeps on its device: packed inputs, the model, sampling in
place.

Nothing here waits for the device: inputs travel in one packed copy, a sampled token that the next
launch needs stays on the device, and results come back through pinned memory when they are asked
for."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.clock import Clock
from core.launch import Launch
from plugins.executor.device_state import DeviceState
from plugins.executor.graphs import DecodeGraphs
from plugins.executor.logprobs import score
from plugins.executor.packing import PackedLaunch, pack, table_arrays
from plugins.executor.paging import Paging
from plugins.executor.results import InFlight, send
from plugins.executor.rows import SamplingRows
from plugins.executor.sampler import SamplePlan, plan_samples, sample
from plugins.executor.sampling import SamplingKernels
from plugins.executor.upload import upload


@dataclass(frozen=True, slots=True)
class LaunchStarter:
    """sampling: None = torch. fault: see InFlight."""

    device: torch.device
    clock: Clock
    paging: Paging
    sampling: SamplingKernels | None
    fault: str

    def start(self, launch: Launch, state: DeviceState) -> InFlight:
        """Start it: as a graph where one can stand for it."""
        for setup in launch.setups:
            state.rows.set(setup)
        penalised = [setup for setup in launch.setups if state.rows.penalised[setup.row]]
        if penalised:
            state.penalties.reset(penalised)
        shares_prefix = state.shares_prefix(launch)
        graphs = state.graphs_for(launch, shares_prefix)
        if graphs is not None:
            return self._replay(graphs, launch, state)
        return self._compute(launch, state, shares_prefix)

    def _replay(self, graphs: DecodeGraphs, launch: Launch, state: DeviceState) -> InFlight:
        updated = not graphs.fits(launch)
        if updated:
            self._update_table(upload(table_arrays(launch), self.device), state)
        tokens, size = graphs.run(launch, state.rows, updated)
        return self._send(launch, tokens, graph_tokens=size, of_all_rows=True)

    def _compute(self, launch: Launch, state: DeviceState, shares_prefix: bool) -> InFlight:
        mixed, size = state.mixed_for(launch, shares_prefix)
        packed = pack(launch, state.rows, state.padding, state.pool.pad_row, size)
        sampled = _sampled(launch, state.rows)
        samples = plan_samples(state.rows, *sampled, for_kernels=self.sampling is not None)
        arrays = packed.arrays
        if mixed is not None:
            arrays = mixed.lay_out(arrays, launch.num_decode_rows)
        inputs = upload(arrays | samples.arrays, self.device)
        self._update_table(inputs, state)
        token_ids, last_tokens = inputs["token_ids"], state.pool.last_tokens
        if launch.feedback.any():
            token_ids[inputs["feedback_at"]] = last_tokens[inputs["feedback_rows"]]
        if mixed is not None:
            states = mixed.run(token_ids, inputs["others"])
            logits = state.forward.score(states, inputs["logits_rows"])
        else:
            logits = state.forward.logits(
                token_ids,
                inputs,
                packed.context_lens,
                packed.query_lens,
                launch.num_decode_rows,
                shares_prefix,
                state.chunk_graphs,
            )
        return self._finish(launch, state, packed, samples, inputs, logits, size)

    def _update_table(self, inputs: dict[str, Tensor], state: DeviceState) -> None:
        self.paging.update(state.pool.table, inputs["reset_rows"], inputs["updates"])

    def _finish(
        self,
        launch: Launch,
        state: DeviceState,
        packed: PackedLaunch,
        samples: SamplePlan,
        inputs: dict[str, Tensor],
        logits: Tensor,
        graph_tokens: int,
    ) -> InFlight:
        """Sample, score the prompts that asked, and send the results towards the host."""
        if state.forward.follows:
            tokens = torch.empty_like(inputs["sampled_rows"])
            state.forward.keep(inputs["sampled_rows"], tokens)
            return self._send(launch, tokens, graph_tokens=graph_tokens)
        scores, kernels = packed.scores, self.sampling
        first = logits[: samples.num_rows]
        drawn = sample(first, samples, inputs, state.penalties, kernels)
        state.forward.keep(inputs["sampled_rows"], drawn.tokens)
        entries = None
        if scores is not None:
            rest = logits[samples.num_rows : packed.num_logits]
            entries = score(rest, inputs["score_targets"], max(scores.num_top), kernels)
        asked: dict[str, Any] = {"samples": samples, "scores": scores, "score_entries": entries}
        asked["graph_tokens"] = graph_tokens
        if state.forward.plans:
            asked["read_plan"] = partial(state.forward.backend.read, state.forward.plans[0])
        return self._send(launch, drawn.tokens, logprobs=drawn.logprobs, **asked)

    def _send(self, launch: Launch, tokens: Tensor, **rest: Any) -> InFlight:
        """Results on their way to the host. rest: fields of InFlight."""
        return send(launch, tokens, self.clock, fault=self.fault, **rest)


def _sampled(launch: Launch, rows: SamplingRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that sample, and the output position each draws for."""
    row_ids = launch.row_ids[launch.samples].astype(np.int64)
    ends = (launch.first_positions + launch.num_tokens)[launch.samples]
    return row_ids, ends - rows.prompt_len[row_ids]
