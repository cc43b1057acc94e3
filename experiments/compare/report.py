"""What a comparison is written as: CSV rows and Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.compare.differences import Comparison, Difference

HEADER = (
    "setting",
    "metric",
    "unit",
    "policy",
    "baseline",
    "baseline_mean",
    "policy_mean",
    "difference",
    "low",
    "high",
    "relative",
    "samples",
    "interval",
    "verdict",
)
ABSENT = "–"


def rows(comparison: Comparison, baseline: str) -> list[tuple[Any, ...]]:
    """One a difference, values in the unit shown; see HEADER."""
    return [
        (
            one.setting,
            one.metric.name,
            one.metric.unit,
            one.policy,
            baseline,
            one.baseline,
            one.own,
            one.difference.mean,
            one.difference.low,
            one.difference.high,
            one.relative,
            one.difference.count,
            one.difference.method,
            one.verdict,
        )
        for one in comparison.differences
    ]


def markdown(comparison: Comparison, baseline: str, steps: Sequence[str]) -> str:
    """A table a setting, the notes, and the first differing steps."""
    parts = [f"# Differences from {baseline}", ""]
    settings = dict.fromkeys(one.setting for one in comparison.differences)
    for setting in settings:
        chosen = [one for one in comparison.differences if one.setting == setting]
        if setting:
            parts += [f"## {setting}", ""]
        parts += [*_table(chosen), ""]
    parts += [f"Interval: {how}." for how in _methods(comparison.differences)]
    if any("one seed" in one.difference.method for one in comparison.differences):
        parts.append(
            "It says nothing about other seeds, and requests of a run are not independent."
        )
    parts += [f"Note: {note}." for note in comparison.notes]
    if steps:
        parts += ["", "## First differing step", "", *steps]
    return "\n".join(parts) + "\n"


def number(value: float | None, sign: bool = False) -> str:
    """Three significant digits, or whole thousands."""
    if value is None:
        return ABSENT
    text = f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.3g}"
    return text if sign else text.removeprefix("+")


def _table(differences: Sequence[Difference]) -> list[str]:
    lines = [
        "| metric | policy | baseline | policy's | difference | 95 % interval | relative | n | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    by_metric = sorted(differences, key=_metric_order(differences))
    before = ""
    for one in by_metric:
        title = one.metric.title
        interval = one.difference
        bounds = (
            ABSENT
            if interval.low is None
            else f"[{number(interval.low, True)}, {number(interval.high, True)}]"
        )
        relative = ABSENT if one.relative is None else f"{100 * one.relative:+.1f} %"
        cells = (
            "" if title == before else title,
            one.policy,
            number(one.baseline),
            number(one.own),
            number(interval.mean, True),
            bounds,
            relative,
            str(interval.count),
            one.verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
        before = title
    return lines


def _metric_order(differences: Iterable[Difference]) -> Any:
    order = {
        name: place for place, name in enumerate(dict.fromkeys(d.metric.name for d in differences))
    }
    return lambda one: order[one.metric.name]


def _methods(differences: Iterable[Difference]) -> list[str]:
    return sorted({one.difference.method for one in differences if one.difference.method})
