"""Kinds over the arrival rate: latency, SLO attainment, goodput."""

from collections.abc import Sequence

import numpy as np

from core.errors import ConfigError
from experiments.figure.options import Options, Slo, along, mean
from experiments.figure.plots import Bar, BarPlot, Line, LinePlot, Panel
from experiments.paper.folders import Run, select
from experiments.paper.intervals import over_seeds
from experiments.paper.metrics import METRICS
from experiments.paper.samples import token_gaps

LATENCIES = ("normalised_mean", "ttft_p50", "ttft_p99")
AXES = {"workload.rate": "request rate (1/s)", "workload.rate_scale": "rate / recorded rate"}


def latency_rate(runs: Sequence[Run], options: Options) -> LinePlot:
    """Latency against request rate, a line a policy, the band Student's t over seeds."""
    key, series = along(runs, options)
    metrics = options.metrics or tuple(METRICS[name] for name in LATENCIES)
    lines = []
    for metric in metrics:
        for label, places in series.items():
            points = [(x, mean(metric, seeds)) for x, seeds in places.items()]
            known = [(x, one) for x, one in points if one is not None]
            if known:
                xs, found = zip(*known, strict=True)
                means = [one.mean for one in found]
                low, high = [one.low for one in found], [one.high for one in found]
                lines.append(Line(metric.name, label, xs, means, low, high))
    x = AXES.get(key, key)
    return LinePlot({m.name: Panel(x, m.title, log_y=True) for m in metrics}, lines)


def attainment(runs: Sequence[Run], options: Options) -> LinePlot:
    """Share of requests within the SLO against rate; a vertical line at each policy's goodput: the
    highest rate tried up to which every one tried meets the SLO."""
    key, series = along(runs, options)
    target = _target(runs, options.slo)
    lines, marks = [], []
    for label, places in series.items():
        found = [over_seeds(_attained(seeds, options.slo)) for seeds in places.values()]
        means = [100 * one.mean for one in found]
        low = [None if one.low is None else 100 * max(one.low, 0.0) for one in found]
        high = [None if one.high is None else 100 * min(one.high, 1.0) for one in found]
        lines.append(Line("attainment", label, list(places), means, low, high))
        rate = highest(list(places), [one.mean for one in found], target)
        if rate is not None:
            marks.append(("attainment", label, rate))
    panel = Panel(AXES.get(key, key), "requests within SLO (%)", level=100 * target)
    return LinePlot({"attainment": panel}, lines, marks)


def goodput(runs: Sequence[Run], options: Options) -> BarPlot:
    """Goodput of each policy on each workload: the rate at which the attainment curve of a seed,
    straight between the rates tried, falls below the target; mean and Student's t over seeds."""
    target = _target(runs, options.slo)
    bars = []
    for workload in dict.fromkeys(str(run.summary["workload"]) for run in runs):
        own = [run for run in runs if run.summary["workload"] == workload]
        key, series = along(own, options)
        for label, places in series.items():
            rates = _rates_by_seed(places, options.slo, target)
            if rates:
                one = over_seeds(rates)
                title = f"goodput: {AXES.get(key, key)}"
                bars.append(Bar(title, workload, label, one.mean, one.low, one.high, one.count))
    if not bars:
        raise ConfigError(f"FOLDER must hold a rate at which {100 * target:g} % meet the SLO")
    return BarPlot(bars)


def attained(run: Run, slo: Slo) -> float:
    """Share of the requests that count (failed ones among them) that were completed within the SLO;
    by the run's own summary where `slo` has no limits. Raises ConfigError if neither has any."""
    if not slo.given:
        share = select(run.summary, "slo.attainment")
        if share is None:
            raise ConfigError(f"--ttft, --tpot or --itl must be given: {run.folder} had no slo.*")
        return float(share)
    kept = run.completed.copy()
    for column, limit in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s)):
        if limit is not None:
            values = run.requests[column]
            kept &= np.isnan(values) & (column == "tpot_s") | (values <= limit)
    if slo.itl_s is not None:
        request, gaps_s = token_gaps(run)
        kept[request[gaps_s > slo.itl_s]] = False
    return float(kept.sum() / max(run.measured.sum(), 1))


def highest(rates: Sequence[float], shares: Sequence[float], target: float) -> float | None:
    """The highest of the ascending rates up to which every share reaches the target."""
    best = None
    for rate, share in zip(rates, shares, strict=True):
        if share < target:
            break
        best = rate
    return best


def crossing(rates: Sequence[float], shares: Sequence[float], target: float) -> float:
    """Where the line through the points at ascending rates first falls below the target: 0 if the
    first is below it, the last rate if none is."""
    best, above = 0.0, 0.0
    for rate, share in zip(rates, shares, strict=True):
        if share < target:
            return best + (rate - best) * (above - target) / (above - share) if best else 0.0
        best, above = rate, share
    return best


def _attained(seeds: dict[int, Run], slo: Slo) -> list[float]:
    return [attained(run, slo) for run in seeds.values()]


def _rates_by_seed(places: dict[float, dict[int, Run]], slo: Slo, target: float) -> list[float]:
    """Goodput of each seed alone; empty if none meets the SLO anywhere."""
    found = []
    for seed in sorted({seed for seeds in places.values() for seed in seeds}):
        own = {rate: seeds[seed] for rate, seeds in places.items() if seed in seeds}
        shares = [attained(run, slo) for run in own.values()]
        found.append(crossing(list(own), shares, target))
    return found if any(found) else []


def _target(runs: Sequence[Run], slo: Slo) -> float:
    if slo.given:
        return slo.attainment
    targets = {select(run.summary, "slo.target") for run in runs} - {None}
    if len(targets) > 1:
        raise ConfigError(f"FOLDER must hold runs of one slo.attainment, got {sorted(targets)}")
    return float(targets.pop()) if targets else slo.attainment
