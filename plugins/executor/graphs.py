"""Launches of one-token rows as graphs, captured at a few sizes before the first request.

A graph replays a launch, from the tokens that feed it to those it samples, by one call instead of
hundreds. Its inputs lie at one fixed place, filled by one copy. A launch of fewer rows is padded
with rows that have a table row of their own and hold one token on page 0; nobody reads what they
compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from core.launch import Int32, Launch
from plugins.executor.rows import DRAWS, FLOAT_DRAWS, SamplingRows

FIELDS = (
    "token_ids",
    "feedback",
    "positions",
    "context_lens",
    "row_ids",
    "sampled_rows",
    "position",
    *DRAWS,
)
"""Columns of a launch's inputs, 64 bits an entry: as in plugins/executor/packing.py and
sampler.py, but feedback: whether the row's last sample takes the place of token_ids, and
sampled_rows: where the row's token goes, the padding's row if it samples none."""

UPDATE_WORDS = 3
LARGEST = 1024
"""Rows beyond which a launch takes the device longer than the host."""


T = TypeVar("T")
Results = TypeVar("Results", Tensor, tuple[Tensor, ...])


class Graph(Protocol):
    """Something captured that can be run again."""

    def replay(self) -> None:
        """Run it on the current stream."""


class Capture(Protocol):
    """Captures a function."""

    def __call__(self, run: Callable[[], Results]) -> tuple[Graph, Results]:
        """The graph, and the tensors that the function returned, which every replay fills."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A size's inputs on the host, twice, for the copy of a launch in flight may still wait:
    words int64 [fields, pitch] and the table updates [size, 3]; and the device's, flat."""

    words: list[NDArray[np.int64]]
    updates: list[NDArray[np.int64]]
    host: list[Tensor]
    device: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A graph of `size` rows, where its inputs go, and where it leaves its tokens, int64 [size]."""

    size: int
    inputs: Inputs
    graph: Graph
    tokens: Tensor


def graph_sizes(largest: int, smallest: int = 1) -> list[int]:
    """Sizes for launches of up to `largest` rows, ascending, `largest` the last: powers of two to
    8, then eighths of a power of two, at least 8 apart; none below `smallest` but the last."""
    sizes, size = [], 1
    while size < largest:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << size.bit_length() >> 4)
    return [*(one for one in sizes if one >= smallest), largest]


def captured_sizes(
    sizes: Sequence[int], capture: Callable[[int], T], label: str, unit: str, progress: bool
) -> dict[int, T]:
    """What `capture` makes of every size (`unit`s), by size, the largest first: the others fit into
    its memory. label: of the progress bar. Raises what `capture` raises, with a note of the size;
    the device may be unusable then."""
    found = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not progress) as bar:
        for size in bar.track(sorted(sizes, reverse=True), description=label):
            try:
                found[size] = capture(size)
            except Exception as error:
                error.add_note(f"while capturing {size} {unit}; executor.graphs=off does without")
                raise
    return found


class DecodeGraphs:
    """Graphs of `step`, a function of the inputs by name that returns tokens int64 [size].

    Names: FIELDS [size], of which the draws of floats are float64; token_rows [size], query_starts
    [size + 1] and logits_rows [size] of one-token rows; updates [size, 3] of the block table. All
    others are int64. pad_row: table row of the padding. capture: how a function is captured.
    smallest: size below which there are no graphs, but for launches that pad to it."""

    def __init__(
        self,
        step: Callable[[dict[str, Tensor]], Tensor],
        largest: int,
        pad_row: int,
        device: torch.device,
        capture: Capture,
        smallest: int = 1,
    ) -> None:
        self.sizes = graph_sizes(largest, smallest)
        self._step = step
        self._capture = capture
        self._pad_row = pad_row
        pitch = largest + largest % 2  # every column at a multiple of 16 bytes
        words = len(FIELDS) * pitch + UPDATE_WORDS * largest
        self._host = [
            torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
            for _ in range(2)
        ]
        self._device = torch.zeros(words, dtype=torch.int64, device=device)
        self._starts = torch.arange(largest + 1, device=device)
        self._index = np.searchsorted(self.sizes, np.arange(largest + 1)).tolist()
        self._captured: list[Captured] = []
        self._turn = 0

    def capture(self, rows: SamplingRows, progress: bool) -> None:
        """Capture every size. Raises what the step raises; the device may be unusable then."""

        def one(size: int) -> Captured:
            inputs = self._inputs(size)
            self._fill(inputs, _nothing(), rows, True)
            views = self._views(inputs, size)
            graph, tokens = self._capture(lambda: self._step(views))
            return Captured(size, inputs, graph, tokens)

        found = captured_sizes(self.sizes, one, "CUDA graphs", "rows", progress)
        self._captured = [found[size] for size in self.sizes]

    def takes(self, launch: Launch, rows: SamplingRows) -> bool:
        """Whether a graph can stand for the launch: one token a row, and nothing but draws."""
        num_rows = len(launch.row_ids)
        return launch.num_decode_rows == num_rows <= self.sizes[-1] and rows.only_draw(
            launch.row_ids, launch.first_positions
        )

    def fits(self, launch: Launch) -> bool:
        """Whether its graph also has room for the launch's table updates: it resets no row."""
        room = self.sizes[self._index[len(launch.row_ids)]]
        return not launch.setups and len(launch.table_updates) <= room

    def run(self, launch: Launch, rows: SamplingRows, updated: bool) -> tuple[Tensor, int]:
        """Replay with a launch that `takes` accepts: its rows' tokens int64 [num_rows], a view that
        the next launch overwrites, and the graph's size. updated: the block table is up to date.
        At most two launches may be in flight."""
        num_rows = len(launch.row_ids)
        captured = self._captured[self._index[num_rows]]
        self._fill(captured.inputs, launch, rows, updated)
        captured.graph.replay()
        return captured.tokens[:num_rows], captured.size

    def _inputs(self, size: int) -> Inputs:
        pitch = size + size % 2
        end, total = len(FIELDS) * pitch, len(FIELDS) * pitch + UPDATE_WORDS * size
        host = [one[:total] for one in self._host]
        arrays = [one.numpy() for one in host]
        return Inputs(
            words=[one[:end].reshape(len(FIELDS), pitch) for one in arrays],
            updates=[one[end:].reshape(size, UPDATE_WORDS) for one in arrays],
            host=host,
            device=self._device[:total],
        )

    def _views(self, inputs: Inputs, size: int) -> dict[str, Tensor]:
        pitch = inputs.words[0].shape[1]
        end = len(FIELDS) * pitch
        columns = inputs.device[:end].view(len(FIELDS), pitch)
        views = {name: column[:size] for name, column in zip(FIELDS, columns, strict=True)}
        views |= {name: views[name].view(torch.float64) for name in FLOAT_DRAWS}
        return views | {
            "token_rows": views["row_ids"],
            "query_starts": self._starts[: size + 1],
            "logits_rows": self._starts[:size],
            "updates": inputs.device[end:].view(size, UPDATE_WORDS),
        }

    def _fill(self, inputs: Inputs, launch: Launch, rows: SamplingRows, updated: bool) -> None:
        self._turn ^= 1
        words, updates = inputs.words[self._turn], inputs.updates[self._turn]
        count = len(launch.row_ids)
        ids, feedback, positions, context_lens, row_ids, sampled, position = words[:7]
        words[:7, count:] = 0
        ids[:count] = launch.token_ids
        feedback[:count] = launch.feedback
        positions[:count] = launch.first_positions
        np.add(positions, 1, out=context_lens)
        row_ids[:count] = launch.row_ids
        row_ids[count:] = self._pad_row
        np.copyto(sampled, row_ids)
        sampled[:count][~launch.samples] = self._pad_row
        np.subtract(context_lens, rows.prompt_len[row_ids], out=position)
        np.take(rows.draws, row_ids, axis=1, out=words[7:], mode="clip")  # clip: into out directly
        num_updates = 0 if updated else len(launch.table_updates)
        updates[:num_updates] = launch.table_updates[:num_updates]
        updates[num_updates:] = (self._pad_row, 0, 0)
        inputs.device.copy_(inputs.host[self._turn], non_blocking=True)


class CudaCapture:
    """Captures CUDA graphs whose memory comes from one pool. mode: torch's capture_error_mode."""

    def __init__(self, device: torch.device, mode: str = "global") -> None:
        self._mode = mode
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Results]) -> tuple[Graph, Results]:
        """Run once, so that what is lazy is compiled and loaded, then capture."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)
            try:
                results = run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, results


def why_not(device: str, sampling: Any, attention: dict[str, Any]) -> str | None:
    """What keeps one-token launches from being captured, None = nothing. device: its type;
    attention: the backend's describe()."""
    if device != "cuda":
        return f"device is {device}"
    if sampling is None:
        return "ops.sampling is torch's"
    for part in ("decode", "shared") if "shared" in attention else ("decode",):
        facts = attention.get(part, {})
        capabilities = facts.get("capabilities")
        if not isinstance(capabilities, dict) or not capabilities.get("graph_safe"):
            return f"attention.{part} {facts.get('kernel')} does not declare graph_safe"
    return None


def _nothing() -> Launch:
    none: Int32 = np.empty(0, np.int32)
    flags = np.empty(0, np.bool_)
    updates: Int32 = np.empty((0, UPDATE_WORDS), np.int32)
    return Launch(-1, none, none, none, none, flags, flags, 0, updates, ())
