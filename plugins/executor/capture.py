"""Every graph of an executor, captured before the first request."""

from functools import partial
from typing import Any

import torch

from plugins.executor.chunk_graphs import ChunkGraphs
from plugins.executor.device_state import SHARED_ROWS, DeviceState
from plugins.executor.graphs import Capture, DecodeGraphs
from plugins.executor.sampling import SamplingKernels


@torch.inference_mode()
def capture_graphs(
    state: DeviceState,
    model: Any,
    kernels: SamplingKernels,
    largest: int,
    capture: Capture,
    progress: bool,
) -> None:
    """Put graphs of launches of up to `largest` one-token rows into the state, others for those
    that share a prefix, and for a model that stops at its attentions graphs of the other launches.
    Raises what the model raises."""
    device = torch.device(model.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the warm-up left cannot be given back while capturing
    kinds = {False: 1}
    if state.sharing is not None and largest >= SHARED_ROWS:
        kinds[True] = SHARED_ROWS
    for shares, smallest in kinds.items():
        step = partial(state.forward.decode, kernels=kernels, shares_prefix=shares)
        place = largest, state.pool.pad_row, device, capture
        graphs = state.graphs[shares] = DecodeGraphs(step, *place, smallest)
        graphs.capture(state.rows, progress)
    if state.padding is not None and hasattr(model, "enter"):
        state.chunk_graphs = ChunkGraphs(model, state.pool, state.padding.sizes, capture)
        state.chunk_graphs.capture(progress)
