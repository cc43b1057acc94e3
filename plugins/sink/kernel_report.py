"""kernels.json and kernels.md: sampled steps by kind, and what that says of the whole run."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from plugins.sink.kernel_profile import GROUPS, LaunchTimes, group_of
from plugins.sink.step_work import Ceilings, ModelShape, StepWork

NOTE = (
    "Times are the device's own, of the profiled steps. The profiler slows the host: where the host"
    " sets the pace, compare with the median outside the profile. A kernel counts from the end of"
    " the one ahead on its stream. Groups that run at once on two streams may add up to more than"
    " the busy time."
)
NAME_COLUMNS = 72
GIGA, TERA = 1e9, 1e12

Report = dict[str, Any]
Sample = tuple[StepWork, LaunchTimes]


@dataclass(slots=True)
class Total:
    """All steps of a kind in a run, profiled or not. least_s: None where a ceiling is unknown."""

    steps: int = 0
    least_s: float | None = 0.0

    def add(self, least_s: float | None) -> None:
        """One more step."""
        self.steps += 1
        known = self.least_s is not None and least_s is not None
        self.least_s = self.least_s + least_s if known else None  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Roofline:
    """What is known of the model and the device, each None if it is not."""

    shape: ModelShape | None
    ceilings: Ceilings | None

    def least_s(self, step: StepWork) -> float | None:
        """The least time of a step, None if it is not known."""
        if self.shape is None or self.ceilings is None:
            return None
        return sum(map(self.ceilings.least_s, self.shape.work(step).values()))


def kind_report(
    samples: Sequence[Sample], total: Total, outside_s: Sequence[float], roofline: Roofline
) -> Report:
    """Means over the sampled steps of a kind, microseconds a step. outside_s: times of steps that
    were not profiled, by the host's clock."""
    times = [one for _, one in samples]
    step_us, busy_us = fmean(one.step_us for one in times), fmean(one.busy_us for one in times)
    least = [roofline.least_s(work) for work, _ in samples]
    return {
        "steps": total.steps,
        "sampled": len(samples),
        "in_graphs": sum(work.graph for work, _ in samples),
        "rows": fmean(work.rows for work, _ in samples),
        "tokens": fmean(work.tokens for work, _ in samples),
        "step_us": step_us,
        "step_median_us": median(one.step_us for one in times),
        "step_outside_us": median(outside_s) * 1e6 if outside_s else None,
        "busy_us": busy_us,
        "between_us": fmean(one.between_us for one in times),
        "within_us": fmean(one.within_us for one in times),
        "idle_share": 1.0 - busy_us / step_us,
        "launches": fmean(len(one.events) for one in times),
        "streams": len({event.stream for one in times for event in one.events}),
        "least_us": None if None in least else fmean(one for one in least if one is not None) * 1e6,
        "groups": _groups(samples, step_us, roofline),
        "kernels": _kernels(times, step_us),
    }


def run_report(
    kinds: Mapping[str, Report],
    totals: Mapping[str, Total],
    duration_s: float | None,
    profiling_s: float,
) -> Report:
    """A run's time, split: least_s of all steps, kernel_gap_s that kernels took beyond it, idle_s
    without a kernel. profiling_s, in which the profiler held the run up, is left out.

    busy_s scales the sampled steps to all of their kind: by least time where that is known, for
    contexts grow, else by number. None, as what follows from it, if a kind was never sampled."""
    busy_s = _busy_s(kinds, totals)
    parts = [total.least_s for total in totals.values()]
    least_s = None if None in parts else sum(one for one in parts if one is not None)
    measured_s = None if duration_s is None else duration_s - profiling_s
    return {
        "measured_s": measured_s,
        "profiling_s": profiling_s,
        "least_s": least_s,
        "busy_s": busy_s,
        "kernel_gap_s": None if busy_s is None or least_s is None else busy_s - least_s,
        "idle_s": None if busy_s is None or measured_s is None else measured_s - busy_s,
        "not_sampled": {name: one.steps for name, one in totals.items() if name not in kinds},
    }


def markdown(report: Report, by_kernel: bool = True) -> str:
    """The report as text. by_kernel: with a table of single kernels below that of groups."""
    lines = [f"# Kernels: {report['name']}", "", report["about"], "", NOTE, ""]
    for name, kind in report["kinds"].items():
        lines += [f"## Steps {name}", "", _balance(kind), ""]
        lines += _table(_group_rows(kind["groups"]))
        if by_kernel:
            lines += _table(_kernel_rows(kind["kernels"]))
    lines += ["## The run", "", *_table(_run_rows(report["run"]))]
    for name, steps in report["run"]["not_sampled"].items():
        lines += [f"Not sampled: {steps:,} steps {name}.", ""]
    lines += [f"Left out: {reason}." for reason in report["left_out"]]
    return "\n".join(lines).rstrip() + "\n"


def _busy_s(kinds: Mapping[str, Report], totals: Mapping[str, Total]) -> float | None:
    busy_s = 0.0
    for name, total in totals.items():
        if name not in kinds:
            return None
        kind = kinds[name]
        if total.least_s is None or not kind["least_us"]:
            busy_s += kind["busy_us"] / 1e6 * total.steps
        else:
            busy_s += kind["busy_us"] / kind["least_us"] * total.least_s
    return busy_s


def _groups(samples: Sequence[Sample], step_us: float, roofline: Roofline) -> list[Report]:
    calls: dict[str, int] = defaultdict(int)
    spent_us: dict[str, float] = defaultdict(float)
    for _, times in samples:
        for event in times.events:
            group = group_of(event.name)
            calls[group] += 1
            spent_us[group] += event.duration_us
    shape, count = roofline.shape, len(samples)
    works = [] if shape is None else [shape.work(step) for step, _ in samples]
    rows = []
    for group in GROUPS:
        if not calls[group]:
            continue
        us = spent_us[group] / count
        row = {"group": group, "calls": calls[group] / count, "us": us, "share": us / step_us}
        own = [work[group] for work in works if group in work]
        if own:
            row |= _rates(own, us / 1e6, roofline.ceilings)
        rows.append(row)
    return rows


def _rates(own: Sequence[tuple[float, float]], spent_s: float, ceilings: Ceilings | None) -> Report:
    read, flops = fmean(one[0] for one in own), fmean(one[1] for one in own)
    rates: Report = {"bytes": read or None, "flops": flops or None}
    rates["tb_s"] = read / spent_s / TERA if read else None
    rates["tflop_s"] = flops / spent_s / TERA if flops else None
    if ceilings is not None and (read or flops):
        rates["roofline"] = fmean(map(ceilings.least_s, own)) / spent_s
    return rates


def _kernels(times: Sequence[LaunchTimes], step_us: float) -> list[Report]:
    calls: dict[str, int] = defaultdict(int)
    spent_us: dict[str, float] = defaultdict(float)
    for one in times:
        for event in one.events:
            calls[event.name] += 1
            spent_us[event.name] += event.duration_us
    names = sorted(calls, key=lambda name: -spent_us[name])
    return [
        {
            "name": name,
            "group": group_of(name),
            "calls": calls[name] / len(times),
            "us": spent_us[name] / len(times),
            "share": spent_us[name] / len(times) / step_us,
        }
        for name in names
    ]


def _balance(kind: Report) -> str:
    """A kind's step in two sentences."""
    outside = kind["step_outside_us"]
    beside = "" if outside is None else f"; {outside:,.0f} outside the profile"
    between, within = (kind[key] / kind["step_us"] for key in ("between_us", "within_us"))
    text = (
        f"{kind['sampled']} of {kind['steps']:,} steps, {kind['in_graphs']} of them in CUDA graphs,"
        f" {kind['rows']:,.1f} rows and {kind['tokens']:,.1f} tokens each."
        f" Step {kind['step_us']:,.0f} µs (median {kind['step_median_us']:,.0f}{beside}),"
        f" device busy {kind['busy_us']:,.0f} µs, idle {kind['idle_share']:.1%}"
        f" ({between:.1%} between launches, {within:.1%} within);"
        f" {kind['launches']:,.0f} kernels and copies; streams: {kind['streams']}."
    )
    if kind["least_us"] is None:
        return text
    least = kind["least_us"]
    return f"{text} Least time {least:,.0f} µs: {least / kind['step_us']:.1%} of the step."


def _group_rows(groups: Sequence[Report]) -> list[list[str]]:
    head = ["group", "calls", "µs", "of step", "GB", "GFLOP", "TB/s", "TFLOP/s", "of roofline"]
    rows = [head]
    for one in groups:
        rows.append(
            [
                one["group"],
                f"{one['calls']:,.1f}",
                f"{one['us']:,.1f}",
                f"{one['share']:.1%}",
                _figure(one.get("bytes"), GIGA),
                _figure(one.get("flops"), GIGA),
                _figure(one.get("tb_s")),
                _figure(one.get("tflop_s")),
                _share(one.get("roofline")),
            ]
        )
    return rows


def _kernel_rows(kernels: Sequence[Report]) -> list[list[str]]:
    rows = [["kernel", "group", "calls", "µs", "of step"]]
    for one in kernels:
        name = one["name"].replace("|", "\\|")
        if len(name) > NAME_COLUMNS:
            name = name[: NAME_COLUMNS - 1] + "…"
        figures = [f"{one['calls']:,.1f}", f"{one['us']:,.1f}", f"{one['share']:.1%}"]
        rows.append([f"`{name}`", one["group"], *figures])
    return rows


def _run_rows(run: Report) -> list[list[str]]:
    parts = {
        "measured, profiler's stops left out": run["measured_s"],
        "least time": run["least_s"],
        "kernel gap": run["kernel_gap_s"],
        "idle gap": run["idle_s"],
    }
    whole = run["measured_s"]
    rows = [["part", "s", "share"]]
    for name, value in parts.items():
        known = value is not None and whole
        share = f"{value / whole:.1%}" if known else "–"
        rows.append([name, "–" if value is None else f"{value:.3f}", share])
    return rows


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _figure(value: float | None, unit: float = 1.0) -> str:
    if value is None:
        return "–"
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
