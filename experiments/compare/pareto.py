"""Throughput against latency: one point a policy and setting, and who is beaten by nobody."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.groups import Group
from experiments.paper.intervals import Interval, over_seeds
from experiments.paper.metrics import Metric
from experiments.paper.style import Palette, legend, tidy

HEADER = ("setting", "policy", "x", "x_low", "x_high", "y", "y_low", "y_high", "seeds", "on_front")


@dataclass(frozen=True, slots=True)
class Point:
    """Means over seeds. on_front: no other point is at least as good in both and better in one."""

    setting: str
    policy: str
    x: Interval
    y: Interval
    on_front: bool

    def row(self) -> tuple[Any, ...]:
        """See HEADER."""
        x, y = ((i.mean, i.low, i.high) for i in (self.x, self.y))
        return (self.setting, self.policy, *x, *y, self.x.count, self.on_front)


def points(groups: Sequence[Group], x: Metric, y: Metric) -> list[Point]:
    """One for each policy of each group that has both metrics."""
    found: list[tuple[str, str, Interval, Interval]] = []
    for group in groups:
        for policy, runs in group.runs.items():
            values = [(x.value(run), y.value(run)) for run in runs.values()]
            known = [(a, b) for a, b in values if a is not None and b is not None]
            if known:
                across, up = zip(*known, strict=True)
                found.append((group.setting, policy, over_seeds(across), over_seeds(up)))
    places = [(_good(x, a.mean), _good(y, b.mean)) for _, _, a, b in found]
    return [
        Point(setting, policy, a, b, not any(_beats(other, own) for other in places))
        for (setting, policy, a, b), own in zip(found, places, strict=True)
    ]


def draw(found: Sequence[Point], x: Metric, y: Metric, palette: Palette, figure: Figure) -> None:
    """Points with their intervals; those on the front are filled and joined."""
    axes = figure.subplots()
    front = sorted((p for p in found if p.on_front), key=lambda p: p.x.mean)
    axes.plot([p.x.mean for p in front], [p.y.mean for p in front], color="#BBBBBB", lw=1, zorder=1)
    for policy in dict.fromkeys(p.policy for p in found):
        own = [p for p in found if p.policy == policy]
        style = palette.line(policy) | {"linestyle": ""}
        for point in own:
            axes.errorbar(
                point.x.mean,
                point.y.mean,
                xerr=_bars(point.x),
                yerr=_bars(point.y),
                **style,
                markerfacecolor=style["color"] if point.on_front else "white",
                elinewidth=0.7,
                label=policy if point is own[0] else None,
            )
    axes.set_xlabel(x.title)
    axes.set_ylabel(y.title)
    tidy(axes)
    legend(figure)


def _good(metric: Metric, value: float) -> float:
    return -value if metric.better == "lower" else value


def _beats(other: tuple[float, float], own: tuple[float, float]) -> bool:
    return other != own and other[0] >= own[0] and other[1] >= own[1]


def _bars(interval: Interval) -> list[list[float]] | None:
    if interval.low is None or interval.high is None:
        return None
    return [[interval.mean - interval.low], [interval.high - interval.mean]]
