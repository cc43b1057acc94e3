"""Kinds over time: memory, batch and queue; a step timeline."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from core.records import Choice, StepRecord
from experiments.figure.options import Options, one_seed
from experiments.figure.plots import Line, LinePlot, Panel, Span, SpanPlot
from experiments.paper.folders import Run
from plugins.sink.series import Series, StepSeries

MAX_BINS = 400
PANELS = {
    "kv": Panel("", "KV in use (%)"),
    "batch": Panel("", "batch"),
    "waiting": Panel("", "waiting"),
    "preemptions": Panel("time (s)", "preemptions"),
}


def over_time(runs: Sequence[Run], options: Options) -> LinePlot:
    """KV pages in use, sequences in a step, queue length (means over each bin) and preemptions so
    far, against time; one seed."""
    lines = []
    for label, run in one_seed(runs, options).items():
        series = _series(run)
        ends = series.edges_s[1:].tolist()
        for name, values in _levels(series).items():
            lines.append(Line(name, label, ends, values, style="step"))
    return LinePlot(dict(PANELS), lines, stacked=True, height_in=4.2)


def steps(runs: Sequence[Run], options: Options) -> SpanPlot:
    """When each of the first requests to arrive waited, ran and stood preempted; one seed.
    timeline.json of the run shows all of it in Perfetto."""
    spans = []
    for label, run in one_seed(runs, options).items():
        spans += _spans(label, run, options.limit)
    return SpanPlot(spans)


def read_steps(run: Run) -> Iterable[StepRecord]:
    """The records of steps.jsonl. Raises ConfigError under records other than full."""
    for line in run.steps():
        choices = [Choice(**choice) for choice in line["choices"]]
        names = StepRecord.__slots__
        fields: dict[str, Any] = {name: line[name] for name in names if name in line}
        yield StepRecord(**{**fields, "choices": choices})


def _series(run: Run) -> Series:
    series = StepSeries(MAX_BINS)
    for record in read_steps(run):
        series.add(record)
    return series.read()


def _levels(series: Series) -> dict[str, list[float]]:
    levels = series.levels
    used = levels["pages_request"] + levels["pages_in_use"]
    pool = used + levels["pages_free"] + levels["pages_evictable"]
    return {
        "kv": (100 * used / np.maximum(pool, 1)).tolist(),
        "batch": levels["batch"].tolist(),
        "waiting": levels["waiting"].tolist(),
        "preemptions": np.cumsum(series.counts["preemptions"]).tolist(),
    }


def _spans(label: str, run: Run, limit: int) -> list[Span]:
    requests = run.requests
    order = np.argsort(requests["arrival_s"], kind="stable")[:limit]
    turns: dict[str, list[tuple[float, str]]] = {
        str(requests["request_id"][row]): [(float(requests["arrival_s"][row]), "waiting")]
        for row in order
    }
    states = {"admitted": "running", "resumed": "running", "preempted": "preempted"}
    for record in run.steps():
        for choice in record["choices"]:
            name = choice["request_id"]
            if name in turns and choice["choice"] == 0 and choice["kind"] in states:
                turns[name].append((record["start_s"], states[choice["kind"]]))
    ends = {str(requests["request_id"][row]): float(requests["finished_s"][row]) for row in order}
    return [
        Span(label, name, state, start_s, end_s)
        for name, own in turns.items()
        for (start_s, state), end_s in zip(
            own, [*(at for at, _ in own[1:]), ends[name]], strict=True
        )
        if end_s > start_s
    ]
