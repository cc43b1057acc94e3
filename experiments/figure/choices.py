"""Kinds that compare choices: Pareto front, ablation, prediction, simulation against a device."""

import json
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import ConfigError
from experiments.compare import pareto as fronts
from experiments.compare.differences import compare
from experiments.figure.options import Options
from experiments.figure.plots import PER_ROW, Bar, BarPlot, Dot, DotPlot, Panel
from experiments.paper.folders import Run
from experiments.paper.groups import arrange, flatten
from experiments.paper.intervals import Interval, over_seeds
from experiments.paper.metrics import METRICS, Metric

PARETO = ("output_tokens_per_s", "e2e_p99")
ABLATION = ("output_tokens_per_s", "ttft_p99", "itl_p99")
GAIN = ("e2e_mean",)
SIMULATION = (
    "output_tokens_per_s",
    "ttft_p50",
    "ttft_p99",
    "itl_p50",
    "itl_p99",
    "e2e_p50",
    "e2e_p99",
)
DECIDES = ("plugins", "workload", "batching", "allocator", "cache", "engine")
PREDICTED = "predicted_output"


def pareto(runs: Sequence[Run], options: Options) -> DotPlot:
    """Throughput against latency, a point a policy and setting (a batch size B, say)."""
    names = options.metrics or tuple(METRICS[name] for name in PARETO)
    require(len(names) == 2, "--metric", "two metrics for this figure", [m.name for m in names])
    found = fronts.points(arrange(runs, options.by), *names)
    dots = [
        Dot(
            "pareto",
            one.policy,
            one.x.mean,
            one.y.mean,
            (one.x.low, one.x.high, one.y.low, one.y.high),
            " ".join([one.setting, "on the front" if one.on_front else ""]).strip(),
        )
        for one in found
    ]
    return DotPlot({"pareto": Panel(names[0].title, names[1].title)}, dots)


def ablation(runs: Sequence[Run], options: Options) -> BarPlot:
    """Relative change from the baseline, paired by seed, the interval Student's t."""
    baseline = _baseline(options)
    groups = arrange(runs, options.by)
    metrics = options.metrics or tuple(METRICS[name] for name in ABLATION)
    compare(groups, metrics, baseline, options.closed_loop)  # refuses runs of unlike requests
    bars = []
    for metric in metrics:
        for group in groups:
            base = group.runs.get(baseline, {})
            for policy, own in group.runs.items():
                change = _relative(metric, base, own)
                if policy != baseline and change is not None:
                    panel = f"{metric.label}: change (%)"
                    bounds = change.low, change.high, change.count
                    bars.append(Bar(panel, group.short, policy, change.mean, *bounds))
    return BarPlot(bars)


def prediction(runs: Sequence[Run], options: Options) -> DotPlot:
    """Error of predicted output lengths against the change from the baseline that they bring.

    Needs the column predicted_output in requests.csv."""
    baseline = _baseline(options)
    (metric,) = options.metrics[:1] or (METRICS[GAIN[0]],)
    dots = []
    for group in arrange(runs, options.by):
        base = group.runs.get(baseline, {})
        for policy, own in group.runs.items():
            if policy == baseline:
                continue
            change = _relative(metric, base, own)
            error = over_seeds([prediction_error(run) for run in own.values()])
            if change is not None:
                bounds = (error.low, error.high, change.low, change.high)
                dots.append(Dot("gain", policy, error.mean, change.mean, bounds, group.setting))
    x = "mean |predicted - output| / mean output"
    return DotPlot({"gain": Panel(x, f"{metric.label}: change (%)")}, dots)


def simulation(runs: Sequence[Run], options: Options) -> DotPlot:
    """Simulated against measured, a panel a metric, with the mean absolute percentage error over
    runs and Kendall's tau of the policies' order (tau-b, over means of seeds).

    Runs pair by seed and by all of the config that decides: plugins, workload, batching, allocator,
    cache, engine. Raises ConfigError if nothing pairs."""
    require(bool(options.measured), "--measured", "folders of runs on a device", [])
    theirs = {_deciding(run): run for run in options.measured}
    pairs = [(run, theirs[key]) for run in runs if (key := _deciding(run)) in theirs]
    require(bool(pairs), "--measured", "runs with the config and seed of a simulated one", 0)
    metrics = options.metrics or tuple(METRICS[name] for name in SIMULATION)
    dots, texts = [], {}
    for metric in metrics:
        values = [
            (m, s, own)
            for own, other in pairs
            if None not in (m := metric.value(other), s := metric.value(own))
        ]
        known = [(m, s, own.policy) for m, s, own in values if m is not None and s is not None]
        dots += [Dot(metric.name, policy, m, s) for m, s, policy in known]
        texts[metric.name] = _agreement(known)
    panels = {m.name: Panel(f"measured {m.title}", f"simulated {m.title}") for m in metrics}
    height_in = 2.2 * -(-len(metrics) // PER_ROW)
    return DotPlot(panels, dots, True, texts, height_in=height_in)


def prediction_error(run: Run) -> float:
    """Mean absolute error of the predicted output lengths of completed requests over their mean
    length. Raises ConfigError without predictions, as in folders of earlier versions."""
    chosen = run.completed
    known = PREDICTED in run.requests and bool(np.isfinite(run.requests[PREDICTED][chosen]).all())
    rule = f"a run folder whose requests.csv has {PREDICTED}"
    require(known, "FOLDER", rule, str(run.folder))
    came = run.requests["output_tokens"][chosen]
    if not len(came):
        raise ConfigError(f"FOLDER must hold a run with a completed request, got {run.folder}")
    return float(np.abs(run.requests[PREDICTED][chosen] - came).mean() / came.mean())


def mape(measured: Sequence[float], simulated: Sequence[float]) -> float | None:
    """Mean absolute percentage error, percent; None where every measured value is zero."""
    errors = [abs(s - m) / abs(m) for m, s in zip(measured, simulated, strict=True) if m]
    return 100 * float(np.mean(errors)) if errors else None


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings; None where one of them ties everything."""
    signs: NDArray[np.float64] = np.array(
        [
            (np.sign(a - b), np.sign(c - d))
            for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2)
        ]
    ).reshape(-1, 2)
    untied = np.abs(signs).sum(axis=0)
    scale = float(np.sqrt(untied.prod()))
    return float(signs.prod(axis=1).sum()) / scale if scale else None


def _agreement(values: Sequence[tuple[float, float, str]]) -> str:
    error = mape([m for m, _, _ in values], [s for _, s, _ in values])
    policies = sorted({policy for _, _, policy in values})
    means = [
        [
            float(np.mean([value[side] for value in values if value[2] == policy]))
            for policy in policies
        ]
        for side in (0, 1)
    ]
    tau = kendall_tau(*means)
    parts = [
        "" if error is None else f"MAPE {error:.1f} %",
        "" if tau is None else f"tau {tau:.2f}",
    ]
    return ", ".join(part for part in parts if part)


def _deciding(run: Run) -> str:
    own = {key: run.config.get(key) for key in DECIDES}
    return json.dumps([flatten(own), run.seed], sort_keys=True, default=str)


def _relative(metric: Metric, base: dict[int, Run], own: dict[int, Run]) -> Interval | None:
    """Percent, paired by seed; None without a pair that has the metric."""
    changes = []
    for seed in sorted(base.keys() & own.keys()):
        before, after = metric.value(base[seed]), metric.value(own[seed])
        if before and after is not None:
            changes.append(100 * (after / before - 1))
    return over_seeds(changes) if changes else None


def _baseline(options: Options) -> str:
    if options.baseline is None:
        raise ConfigError("--baseline must be given for this figure")
    return options.baseline
