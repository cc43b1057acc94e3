"""PNG figures in the run's folder: figures/memory.png and figures/latency.png."""

from collections import deque
from pathlib import Path
from typing import Any

from core.hookspecs import hookimpl
from core.records import RequestRecord, StepRecord
from plugins.shared.run_info import RunInfo, SinkQuery
from plugins.sink.plots import latency_figure, memory_figure
from plugins.sink.series import StepSeries

MAX_TOKENS = 2_000_000  # of the requests kept: some 40 MB; a server's run has no end
RECORD_TOKENS = 50  # what a record weighs beside its tokens


class Figures:
    """Draws when the run is over. memory.png: KV pages by owner, preemptions, batch and queue
    against time; latency.png: distributions of time to first token and of inter-token latency."""

    @hookimpl
    def build_sink(self, query: SinkQuery) -> "FiguresSink":
        """Gather for one run."""
        return FiguresSink(Path(query.folder) / "figures")


class FiguresSink:
    """Keeps a bounded series of steps, and the records of the last ended requests, of MAX_TOKENS
    in all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._series = StepSeries()
        self._records: deque[RequestRecord] = deque()
        self._ended = self._tokens = 0

    def step(self, record: StepRecord) -> None:
        """Take one step into the series."""
        self._series.add(record)

    def request(self, record: RequestRecord) -> None:
        """Keep one ended request."""
        self._records.append(record)
        self._ended += 1
        self._tokens += record.output_tokens + RECORD_TOKENS
        while self._tokens > MAX_TOKENS:
            self._tokens -= self._records.popleft().output_tokens + RECORD_TOKENS

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Draw; a run without a single step has nothing to draw."""
        series = self._series.read()
        self._folder.mkdir(exist_ok=True)
        title = figure_title(run)
        if len(series.edges_s) > 1:
            memory_figure(series, title).savefig(self._folder / "memory.png")
        if self._ended > len(self._records):
            title += f"  ·  the last {len(self._records):,} of {self._ended:,} requests"
        latency_figure(list(self._records), title).savefig(self._folder / "latency.png")


def figure_title(run: RunInfo) -> str:
    """What ran, on one line."""
    return f"{run.name}  ·  policy {run.policy}  ·  seed {run.seed}"
