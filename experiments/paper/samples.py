"""A metric as a function of how often each request is counted: what a bootstrap resamples."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from experiments.paper.folders import Run
from experiments.paper.intervals import Counts
from experiments.paper.metrics import Metric

Statistic = Callable[[Counts], float | None]
Floats = NDArray[np.float64]


def statistic(metric: Metric, run: Run, order: NDArray[np.str_]) -> Statistic | None:
    """The metric in the unit shown, given counts of the requests named in `order` (ids of requests
    that count, each once). None for a metric that is no function of requests (throughput)."""
    rows = _rows(run, order)
    if metric.part:
        return _sums(metric, run, rows)
    if metric.gaps:
        values, owners = _gaps(run, rows)
    elif metric.column:
        values, owners = _completed(run, rows, metric.column)
    else:
        return None
    sorting = np.argsort(values, kind="stable")
    return _of_samples(metric, values[sorting], owners[sorting])


def _of_samples(metric: Metric, values: Floats, owners: NDArray[np.int64]) -> Statistic:
    def evaluate(counts: Counts) -> float | None:
        weights = counts[owners]
        if not weights.any():
            return None
        if metric.quantile is None:
            return metric.scale * float(np.average(values, weights=weights))
        return metric.scale * _quantile(values, weights, metric.quantile)

    return evaluate


def _sums(metric: Metric, run: Run, rows: NDArray[np.int64]) -> Statistic:
    parts = run.requests[metric.part][rows]
    wholes = run.requests[metric.whole][rows] if metric.whole else None

    def evaluate(counts: Counts) -> float | None:
        part = float(parts @ counts)
        if wholes is None:
            return metric.scale * part
        whole = float(wholes @ counts)
        return metric.scale * part / whole if whole else None

    return evaluate


def _quantile(values: Floats, weights: NDArray[np.int64], q: float) -> float:
    """Of sorted values, each repeated so often, interpolated linearly as np.percentile does."""
    ends = np.cumsum(weights)
    place = q * (ends[-1] - 1)
    below = int(place)
    first, second = np.searchsorted(ends, [below, min(below + 1, ends[-1] - 1)], side="right")
    return float(values[first] + (place - below) * (values[second] - values[first]))


def _rows(run: Run, order: NDArray[np.str_]) -> NDArray[np.int64]:
    ids = run.requests["request_id"]
    sorting = np.argsort(ids)
    return np.asarray(sorting[np.searchsorted(ids, order, sorter=sorting)], np.int64)


def _completed(run: Run, rows: NDArray[np.int64], column: str) -> tuple[Floats, NDArray[np.int64]]:
    values = run.requests[column][rows]
    owners = np.flatnonzero(run.completed[rows] & np.isfinite(values))
    return values[owners], owners


def _gaps(run: Run, rows: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    """Every gap between two tokens of one choice, with the place in `rows` of its request."""
    place = np.full(len(run.completed), -1, np.int64)
    place[rows] = np.where(run.completed[rows], np.arange(len(rows)), -1)
    request, gaps_s = token_gaps(run)
    owners = place[request]
    return gaps_s[owners >= 0], owners[owners >= 0]


def token_gaps(run: Run) -> tuple[NDArray[np.int64], Floats]:
    """All gaps between successive tokens of a choice, seconds, with the row of its request."""
    tokens = run.tokens
    request = tokens["request"].astype(np.int64)
    same = (np.diff(request) == 0) & (np.diff(tokens["choice"]) == 0)
    return request[1:][same], np.diff(tokens["time_s"])[same]
