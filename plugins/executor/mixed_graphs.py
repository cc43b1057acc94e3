"""Launches of any rows as one graph each, where the host would else keep the device waiting.

A launch with chunks beside one-token rows takes the host a few milliseconds, whatever it computes:
each layer is a graph and its attention (plugins/executor/chunk_graphs.py). Below some thousand
tokens of a small model that is longer than the device works. Here all layers are one graph, for a
number of tokens: kernels read lengths on the device, and rows that are not there are padding.

The decode kernel serves the first tokens as if all of them were one-token rows; the extend kernel
comes after it and writes over what belongs to chunks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.launch import Launch
from plugins.executor.chunk_graphs import LayeredModel, borrowed
from plugins.executor.forward import Forward
from plugins.executor.graphs import Capture, Graph, captured_sizes
from plugins.shared.launch_sizes import GRAPHED_CHUNKS as CHUNKS
from plugins.shared.launch_sizes import GRAPHED_CONTEXT as CONTEXT
from plugins.shared.launch_sizes import GRAPHED_WORK as WORK
from plugins.shared.launch_sizes import least

FIELDS = ("positions", "token_rows", "row_ids", "context_lens", "query_starts")
"""Of PackedLaunch.arrays, what a graph takes besides token_ids."""

STEPS = ((128, 32), (1024, 64), (2048, 128))
"""Tokens of a launch: up to how many, a graph every so many. Below the first, and in a large model
below the second, tokens more cost little beside the weights that are read."""

LAYER_OPERATIONS = 1.2e11
"""Of a layer's matrix products, at most: what an H200 computes in the 200 us or so that a layer
takes the host if it is launched by itself. Beyond, the host is in no hurry, and pieces do."""


@dataclass(frozen=True, slots=True, eq=False)
class Sized:
    """A graph with room for `ones` one-token rows. token_ids, others: its inputs, see
    MixedGraphs.lay_out. hidden, delta: what the model's `score` takes."""

    ones: int
    token_ids: Tensor
    others: Tensor
    graph: Graph
    hidden: Tensor
    delta: Tensor


class MixedGraphs:
    """Graphs of `forward` at those of `sizes` (tokens, ascending) that are worth it. most_rows: of
    a launch. pad_row: table row of the padding. capture: how a function is captured. shares_prefix:
    of the one-token rows."""

    def __init__(
        self,
        forward: Forward,
        sizes: list[int],
        most_rows: int,
        pad_row: int,
        capture: Capture,
        shares_prefix: bool = False,
    ) -> None:
        self._forward, self._capture, self._shares = forward, capture, shares_prefix
        self._most_rows, self._pad_row = most_rows, pad_row
        model: Any = forward.model  # a LayeredModel
        self.sizes = mixed_sizes(sizes, model)
        self._captured: dict[int, Sized] = {}
        largest = max(self.sizes, default=0)
        self._work = WORK / (4 * model.num_q_heads * model.head_dim)
        self._device = torch.device(model.device)
        words = largest, _words(largest, min(largest, most_rows))
        self._token_ids, self._others = (
            torch.zeros(count, dtype=torch.int64, device=self._device) for count in words
        )

    def capture(self, progress: bool) -> None:
        """Capture every size."""
        facts = "CUDA graphs of mixed launches", "tokens", progress
        self._captured = captured_sizes(self.sizes, self._sized, *facts)

    def size_for(self, launch: Launch) -> int:
        """Tokens, padding included, of the graph that stands for the launch; 0 if none can, or
        kernels that know its lengths are better."""
        ones, size = launch.num_decode_rows, least(self.sizes, len(launch.token_ids))
        if not size or ones > self._captured[size].ones or len(launch.row_ids) - ones > CHUNKS:
            return 0
        new = launch.num_tokens[ones:].astype(np.int64)
        context = launch.first_positions[ones:] + new
        fits = context.max(initial=0) <= CONTEXT and (new * context).sum() <= self._work
        return size if fits else 0

    def lay_out(self, arrays: dict[str, NDArray[Any]], ones: int) -> dict[str, NDArray[Any]]:
        """PackedLaunch.arrays of a launch with so many one-token rows, those that a graph takes but
        token_ids as one array, `others` int64: for T tokens, N rows of one token and CHUNKS others,
        padding included, positions and token_rows [T], row_ids and context_lens [N + CHUNKS], and
        query_starts [N + CHUNKS + 1]."""
        rest = dict(arrays)
        positions, token_rows, row_ids, context_lens, starts = (rest.pop(name) for name in FIELDS)
        size, chunks = len(positions), len(row_ids) - ones
        room = self._captured[size].ones
        others = np.empty(_words(size, room), np.int64)
        tokens, rows, lens, begins = _parts(others, size, room)
        tokens[0], tokens[1] = positions, token_rows
        rows.fill(self._pad_row)
        lens[:room], lens[room:] = 1, 0
        for into, given in ((rows, row_ids), (lens, context_lens)):
            into[:ones], into[room : room + chunks] = given[:ones], given[ones:]
        begins[:room] = np.arange(room)
        begins[room : room + chunks], begins[room + chunks :] = starts[ones:-1], starts[-1]
        return rest | {"others": others}

    def run(self, token_ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Replay with what `lay_out` made, on the device: what the model's `score` takes, views
        that the next launch overwrites."""
        sized = self._captured[len(token_ids)]
        sized.token_ids.copy_(token_ids)
        sized.others.copy_(others)
        sized.graph.replay()
        return sized.hidden, sized.delta

    def _sized(self, size: int) -> Sized:
        room = min(size, self._most_rows)
        token_ids, others = self._token_ids[:size], self._others[: _words(size, room)]
        tokens, rows, lens, begins = _parts(others, size, room)
        token_ids.zero_()
        tokens[0], tokens[1], rows[:] = 0, self._pad_row, self._pad_row
        lens[:room], lens[room:] = 1, 0
        begins[:room], begins[room:] = torch.arange(room), room
        given = dict(zip(FIELDS, (*tokens, rows, lens, begins), strict=True))
        graph, (hidden, delta) = self._capture(
            lambda: self._forward.states(token_ids, given, room, CHUNKS, self._shares)
        )
        return Sized(room, token_ids, others, graph, borrowed(hidden), borrowed(delta))


def mixed_sizes(sizes: list[int], model: LayeredModel) -> list[int]:
    """Those of `sizes` (tokens, ascending) that are captured for a model: multiples of STEPS and
    the last, as far as LAYER_OPERATIONS goes."""
    most = LAYER_OPERATIONS / (2 * model.layer_parameters)
    found = []
    for size in sizes:
        step = next((step for end, step in STEPS if size <= end), None)
        if step is not None and (size % step == 0 or size == sizes[-1]) and size <= most:
            found.append(size)
    return found


def _words(size: int, room: int) -> int:
    return 2 * size + 3 * (room + CHUNKS) + 1


def _parts(others: Any, size: int, room: int) -> tuple[Any, Any, Any, Any]:
    """Tokens [2, T], row_ids and context_lens [N + CHUNKS] and query_starts [N + CHUNKS + 1] of
    such an array or tensor."""
    begin, rows = 2 * size, room + CHUNKS
    middle, end = begin + rows, begin + 2 * rows
    tokens = others[:begin].reshape(2, size)
    return tokens, others[begin:middle], others[middle:end], others[end:]
