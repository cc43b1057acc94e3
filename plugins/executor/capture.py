"""Every graph of an executor, captured before the first request."""

from functools import partial
from typing import Any

import torch

from plugins.executor.chunk_graphs import ChunkGraphs
from plugins.executor.device_state import SHARED_ROWS, DeviceState
from plugins.executor.graphs import Capture, DecodeGraphs, graph_sizes
from plugins.executor.mixed_graphs import MixedGraphs, mixed_sizes
from plugins.executor.sampling import SamplingKernels


def num_graphs(state: DeviceState, model: Any, largest: int) -> int:
    """Whole launches that `capture_graphs` captures at most."""
    count = len(graph_sizes(largest))
    if state.padding is not None and _captures_mixed(state, model):
        count += len(mixed_sizes(state.padding.sizes, model))
    return (1 + (state.sharing is not None)) * count


def _captures_mixed(state: DeviceState, model: Any) -> bool:
    """Whether the model stops at its attentions, and these may be captured."""
    return hasattr(model, "enter") and getattr(state.forward.backend, "extends_in_graph", False)


def graph_facts(state: DeviceState) -> dict[str, Any]:
    """Sizes of all graphs, and those to which launches are padded, for the manifest."""
    facts: dict[str, Any] = {"sizes": [], "why_not": state.why_not}
    for shares, graphs in state.graphs.items():
        facts["sizes_shared" if shares else "sizes"] = graphs.sizes
    for shares, mixed in state.mixed_graphs.items():
        facts["sizes_of_mixed_shared" if shares else "sizes_of_mixed"] = mixed.sizes
    if state.chunk_graphs is not None:
        facts["sizes_of_chunks"] = state.chunk_graphs.sizes
    if state.padding is not None:
        facts["sizes_of_tokens"] = state.padding.sizes
    return facts


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
    that share a prefix, and for a model that stops at its attentions graphs of the other launches,
    whole or in pieces.
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
        sizes = state.padding.sizes
        chunks = state.chunk_graphs = ChunkGraphs(model, state.pool, sizes, capture)
        chunks.capture(progress)
        state.padding.sizes = chunks.padding_sizes(sizes)
        if _captures_mixed(state, model):
            for shares in kinds:
                rows = largest, state.pool.pad_row
                mixed = state.mixed_graphs[shares] = MixedGraphs(
                    state.forward, sizes, *rows, capture, shares
                )
                mixed.capture(progress)
