"""Launches with chunks that no single graph stands for (plugins/executor/mixed_graphs.py):
everything between two layers' attentions as one graph.

Attention over chunks depends on the lengths in a launch, so it is launched as it is; all the rest
depends on the number of tokens alone, and is captured at a few sizes before the first request. A
launch then takes the host one replay a layer and its attention, instead of a dozen calls."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plugins.executor.graphs import Capture, Graph, captured_sizes
from plugins.executor.pool import KVPool
from plugins.shared.model_protocols import Attend, KVTarget

SMALLEST, EVERY, COARSE = 16, 512, 2048
"""Sizes from SMALLEST tokens on, above COARSE every so many."""

EAGER_OPERATIONS = 3e11
"""Of a layer's matrix products, at most: what an H200 computes in the 500 us that a layer takes the
host whose kernels are launched one by one. Up to here padding to the next graph costs less."""


class LayeredModel(Protocol):
    """A model that can stop before and after each attention (plugins/model/decoder.py)."""

    num_layers: int
    num_q_heads: int
    head_dim: int
    layer_parameters: int  # of a layer's matrices
    dtype: torch.dtype
    device: torch.device

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
        """Hidden states and what all layers share of the positions: tensors."""

    def enter(
        self, index: int, hidden: Tensor, delta: Tensor | None, shared: Any, attend: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer up to its attention: hidden states, q, k, v."""

    def attend(self, attend: Attend, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A layer's attention."""

    def leave(self, index: int, hidden: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """A layer after its attention: hidden states, and what is to be added to them."""

    def score(self, hidden: Tensor, delta: Tensor | None, logits_rows: Tensor) -> Tensor:
        """Logits."""


@dataclass(frozen=True, slots=True, eq=False)
class Layered:
    """The graphs of one size: up to each attention, with its q, k and v, and after the last one."""

    entries: list[tuple[Graph, tuple[Tensor, Tensor, Tensor]]]
    last: Graph
    hidden: Tensor
    delta: Tensor


class ChunkGraphs:
    """Graphs of `model` at those of `sizes` (tokens, ascending) that are worth it. capture: how a
    function is captured."""

    def __init__(
        self, model: LayeredModel, pool: KVPool, sizes: list[int], capture: Capture
    ) -> None:
        coarse = (size for size in sizes if size > COARSE and size % EVERY == 0)
        fine = (size for size in sizes if SMALLEST <= size <= COARSE)
        self.sizes = sorted({*fine, *coarse, sizes[-1]})
        self.model, self._pool, self._capture = model, pool, capture
        largest, device = self.sizes[-1], model.device
        self._inputs = torch.zeros(3, largest, dtype=torch.int64, device=device)
        shape = (largest, model.num_q_heads, model.head_dim)
        self._out = torch.zeros(shape, dtype=model.dtype, device=device)
        self._captured: dict[int, Layered] = {}

    def capture(self, progress: bool) -> None:
        """Capture every size."""
        facts = "CUDA graphs of chunks", "tokens", progress
        self._captured = captured_sizes(self.sizes, self._layered, *facts)

    def padding_sizes(self, sizes: list[int]) -> list[int]:
        """Those of `sizes` (tokens, ascending) to which launches are better padded: without those
        between two graphs, as long as padding to the next costs less than doing without."""
        most = EAGER_OPERATIONS / (2 * self.model.layer_parameters)
        graphed = set(self.sizes)
        return [size for size in sizes if size in graphed or not COARSE < size <= most]

    def takes(self, num_tokens: int) -> bool:
        """Whether there are graphs for launches of so many tokens."""
        return num_tokens in self._captured

    def out(self, num_tokens: int) -> Tensor:
        """Where `run` wants results of attention [T, Hq, D]; others it copies there."""
        return self._out[:num_tokens]

    def run(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """All layers over packed tokens int64 [T], whose K and V go to `slots`: what the model's
        `score` takes, views that the next launch overwrites."""
        size = len(token_ids)
        layered, out = self._captured[size], self.out(size)
        for place, given in zip(self._inputs, (token_ids, positions, slots), strict=True):
            place[:size].copy_(given)
        for index, (graph, qkv) in enumerate(layered.entries):
            graph.replay()
            found = self.model.attend(attend, index, *qkv)
            if found.data_ptr() != out.data_ptr():
                out.copy_(found)
        layered.last.replay()
        return layered.hidden, layered.delta

    def _layered(self, size: int) -> Layered:
        model, out = self.model, self.out(size)
        token_ids, positions, slots = self._inputs[:, :size]
        stores = _Stores(self._pool, slots)

        def first() -> tuple[Tensor, ...]:
            hidden, shared = model.embed(token_ids, positions)
            return *shared, *model.enter(0, hidden, None, shared, stores)

        graph, (*shared, hidden, q, k, v) = self._capture(first)
        entries = [(graph, (borrowed(q), borrowed(k), borrowed(v)))]
        for index in range(1, model.num_layers):

            def between(index: int = index, before: Tensor = hidden) -> tuple[Tensor, ...]:
                hidden, delta = model.leave(index - 1, before, out)
                return model.enter(index, hidden, delta, tuple(shared), stores)

            del q, k, v  # read before the next graph runs: it may take their memory
            graph, (hidden, q, k, v) = self._capture(between)
            entries.append((graph, (borrowed(q), borrowed(k), borrowed(v))))

        def last(before: Tensor = hidden) -> tuple[Tensor, ...]:
            return model.leave(model.num_layers - 1, before, out)

        graph, (hidden, delta) = self._capture(last)
        return Layered(entries, graph, borrowed(hidden), borrowed(delta))


@dataclass(frozen=True, slots=True)
class _Stores:
    """As LaunchAttention, without attention."""

    pool: KVPool
    slots: Tensor

    def target(self, layer: int) -> KVTarget:
        """Where the layer's K and V go."""
        return self.pool.target(layer, self.slots)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the layer's K and V into the pool."""
        self.pool.store(layer, self.slots, k, v)


class _Memory:
    """Device memory that another tensor owned, for torch.as_tensor."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"<i{size}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, which may be given to others meanwhile: graphs that use one pool run in
    turns, and a tensor is read before the graph that overwrites it."""
    if not tensor.is_cuda:
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
