"""Distributions of latencies."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigError
from experiments.figure.options import Options
from experiments.figure.plots import Line, LinePlot, Panel
from experiments.paper.folders import Run
from experiments.paper.groups import arrange
from experiments.paper.intervals import over_seeds
from experiments.paper.samples import token_gaps

RANKS = np.concatenate([np.linspace(0, 0.98, 99), np.linspace(0.981, 1, 20)])
PANELS = {
    "ttft": Panel("time to first token (s)", "cumulative share", log_x=True),
    "itl": Panel("inter-token latency (s)", "", log_x=True),
    "e2e": Panel("end-to-end latency (s)", "", log_x=True),
}


def cdf(runs: Sequence[Run], options: Options) -> LinePlot:
    """Cumulative distributions of TTFT, ITL (a sample a gap) and E2E of completed requests: at each
    rank the mean quantile over seeds, the band Student's t, cut at the smallest sample."""
    groups = arrange(runs, options.by)
    lines = []
    for group in groups:
        for policy, seeds in sorted(group.runs.items()):
            label = f"{policy} {group.short}".strip()
            for name in PANELS:
                lines += _line(name, label, list(seeds.values()))
    if not lines:
        raise ConfigError("FOLDER must hold a completed request")
    return LinePlot({name: PANELS[name] for name in {line.panel: 0 for line in lines}}, lines)


def _line(name: str, label: str, runs: Sequence[Run]) -> list[Line]:
    samples = [values for run in runs if len(values := _samples(run, name))]
    if not samples:
        return []
    quantiles = np.stack([np.quantile(one, RANKS) for one in samples])
    found = [over_seeds(column.tolist()) for column in quantiles.T]
    floor = float(quantiles.min())
    low = [None if one.low is None else max(one.low, floor) for one in found]
    high = [one.high for one in found]
    means = [one.mean for one in found]
    return [Line(name, label, means, RANKS.tolist(), low, high, across=True, style="plain")]


def _samples(run: Run, name: str) -> NDArray[np.float64]:
    if name == "itl":
        request, gaps_s = token_gaps(run)
        return gaps_s[run.completed[request]]
    values = run.requests[f"{name}_s"][run.completed]
    return np.asarray(values[np.isfinite(values)])
