"""Forms of figures: each holds what is drawn, gives it as CSV rows, and draws no more than that."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any, Protocol

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.paper.style import MUTED, Palette, legend, log_ticks, tidy

PER_ROW = 4  # panels of a scatter
ROOM, WRAP = 24, 24  # letters below a panel, and in a line beside it
STATES = {"waiting": "#E69F00", "running": "#0072B2", "preempted": "#D55E00"}


class Plot(Protocol):
    """What a kind returns."""

    height_in: float
    notes: tuple[str, ...]
    """What was left out, and why."""

    @property
    def header(self) -> Sequence[str]:
        """Columns of the CSV."""

    def rows(self) -> list[tuple[Any, ...]]:
        """Exactly the numbers drawn."""

    def labels(self) -> list[str]:
        """What has a colour of the palette."""

    def draw(self, figure: Figure, palette: Palette) -> None:
        """Draw the rows."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one curve. low, high: bounds of y (of x where across), empty or one a point."""

    panel: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    across: bool = False
    style: str = "line"  # line with marks, step, or plain


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    level: float | None = None  # a horizontal line


@dataclass(slots=True)
class LinePlot:
    """Curves in panels side by side, or below each other where stacked.

    marks: (panel, label, x) of a vertical line. bounds, clients: labels that are no policies, the
    former drawn grey, the latter in colours of their own."""

    panels: dict[str, Panel]
    lines: list[Line]
    marks: list[tuple[str, str, float]] = field(default_factory=list)
    bounds: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stacked: bool = False
    height_in: float = 2.3
    header: Sequence[str] = ("panel", "label", "x", "y", "low", "high")

    def rows(self) -> list[tuple[Any, ...]]:
        """A point a row; a mark has no y."""
        found: list[tuple[Any, ...]] = []
        for line in self.lines:
            bounds = (
                zip(line.low, line.high, strict=True) if line.low else [(None, None)] * len(line.x)
            )
            points = zip(line.x, line.y, bounds, strict=True)
            found += [(line.panel, line.label, x, y, *both) for x, y, both in points]
        return found + [
            (panel, f"{label} (mark)", x, None, None, None) for panel, label, x in self.marks
        ]

    def labels(self) -> list[str]:
        """Of curves that are policies."""
        others = (*self.bounds, *self.clients)
        return [line.label for line in self.lines if line.label not in others]

    def draw(self, figure: Figure, palette: Palette) -> None:
        """All panels; the legend above the first."""
        num = len(self.panels)
        shape = (num, 1) if self.stacked else (1, num)
        axes = figure.subplots(*shape, squeeze=False, sharex=self.stacked).ravel()
        for (name, panel), one in zip(self.panels.items(), axes, strict=True):
            for line in self.lines:
                if line.panel == name:
                    self._line(one, line, palette)
            for at, label, x in self.marks:
                if at == name:
                    one.axvline(x, color=palette.colour(label), lw=0.8, ls=":")
            _dress(one, panel, bare=self.stacked and one is not axes[-1])
        legend(figure)

    def _line(self, axes: Axes, line: Line, palette: Palette) -> None:
        style = self._style(line.label, palette)
        if line.style != "line":
            style.pop("marker", None)
        drawn = axes.step if line.style == "step" else axes.plot
        more: dict[str, Any] = {"where": "post"} if line.style == "step" else {}
        drawn(line.x, line.y, label=line.label, **style, **more)
        if line.low:
            low, high = (
                np.array([np.nan if one is None else one for one in side], np.float64)
                for side in (line.low, line.high)
            )
            shade = axes.fill_betweenx if line.across else axes.fill_between
            shade(
                line.y if line.across else line.x, low, high, color=style["color"], alpha=0.18, lw=0
            )

    def _style(self, label: str, palette: Palette) -> dict[str, Any]:
        if label in self.bounds:
            return {"color": MUTED, "ls": ("--", ":", "-.")[self.bounds.index(label)]}
        if label in self.clients:
            place = self.clients.index(label) / max(len(self.clients) - 1, 1)
            return {"color": colormaps["viridis"](0.9 * place)}
        return palette.line(label)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. group: along the axis; label: the policy."""

    panel: str
    group: str
    label: str
    value: float
    low: float | None = None
    high: float | None = None
    samples: int = 1


@dataclass(slots=True)
class BarPlot:
    """Bars with their intervals, a panel for each y label."""

    bars: list[Bar]
    notes: tuple[str, ...] = ()
    height_in: float = 2.2
    header: Sequence[str] = ("panel", "group", "label", "value", "low", "high", "samples")

    def rows(self) -> list[tuple[Any, ...]]:
        """A bar a row."""
        return [(b.panel, b.group, b.label, b.value, b.low, b.high, b.samples) for b in self.bars]

    def labels(self) -> list[str]:
        """Of all bars."""
        return [bar.label for bar in self.bars]

    def draw(self, figure: Figure, palette: Palette) -> None:
        """Groups side by side in each panel."""
        names = list(dict.fromkeys(bar.panel for bar in self.bars))
        axes = figure.subplots(1, len(names), squeeze=False).ravel()
        for name, one in zip(names, axes, strict=True):
            self._panel(one, [bar for bar in self.bars if bar.panel == name], palette)
            one.set_ylabel(fill(name, WRAP))
            tidy(one)
        legend(figure)

    def _panel(self, axes: Axes, bars: Sequence[Bar], palette: Palette) -> None:
        groups = list(dict.fromkeys(bar.group for bar in bars))
        labels = list(dict.fromkeys(bar.label for bar in bars))
        width = 0.8 / len(labels)
        for bar in bars:
            place = groups.index(bar.group) + (labels.index(bar.label) + 0.5) * width - 0.4
            bounds = None
            if bar.low is not None and bar.high is not None:
                bounds = [[bar.value - bar.low], [bar.high - bar.value]]
            first = bar.group == next(b.group for b in bars if b.label == bar.label)
            axes.bar(
                place,
                bar.value,
                width * 0.92,
                yerr=bounds,
                color=palette.colour(bar.label),
                error_kw={"lw": 0.8, "capsize": 1.5},
                label=bar.label if first else None,
            )
        axes.axhline(0, color=MUTED, lw=0.6)
        turned: dict[str, Any] = (
            {"rotation": 25, "ha": "right"} if sum(map(len, groups)) > ROOM else {}
        )
        axes.set_xticks(range(len(groups)), groups, **turned)


@dataclass(frozen=True, slots=True)
class Dot:
    """One point of a scatter with the bounds of x and y."""

    panel: str
    label: str
    x: float
    y: float
    bounds: tuple[float | None, float | None, float | None, float | None] = (None,) * 4
    note: str = ""


@dataclass(slots=True)
class DotPlot:
    """Points. diagonal: the line y = x in each panel. texts: panel -> a line of text."""

    panels: dict[str, Panel]
    dots: list[Dot]
    diagonal: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    height_in: float = 2.4
    header: Sequence[str] = (
        "panel",
        "label",
        "x",
        "y",
        "x_low",
        "x_high",
        "y_low",
        "y_high",
        "note",
    )

    def rows(self) -> list[tuple[Any, ...]]:
        """A point a row, then the texts."""
        rows: list[tuple[Any, ...]] = [
            (d.panel, d.label, d.x, d.y, *d.bounds, d.note) for d in self.dots
        ]
        return rows + [(panel, "", *[None] * 6, text) for panel, text in self.texts.items()]

    def labels(self) -> list[str]:
        """Of all points."""
        return [dot.label for dot in self.dots]

    def draw(self, figure: Figure, palette: Palette) -> None:
        """All panels side by side."""
        num_rows = -(-len(self.panels) // PER_ROW)
        grid = figure.add_gridspec(num_rows, -(-len(self.panels) // num_rows))
        places = [figure.add_subplot(grid[index]) for index in range(len(self.panels))]
        for (name, panel), one in zip(self.panels.items(), places, strict=True):
            dots = [dot for dot in self.dots if dot.panel == name]
            for place, dot in enumerate(dots):
                first = dot.label not in [other.label for other in dots[:place]]
                style = palette.line(dot.label) | {"linestyle": ""}
                bars: dict[str, Any] = {
                    "xerr": _error(dot.x, *dot.bounds[:2]),
                    "yerr": _error(dot.y, *dot.bounds[2:]),
                }
                one.errorbar(
                    dot.x,
                    dot.y,
                    **bars,
                    **style,
                    elinewidth=0.7,
                    label=dot.label if first else None,
                )
            if self.diagonal and dots:
                ends = [f(f(d.x, d.y) for d in dots) for f in (min, max)]
                one.plot(ends, ends, color=MUTED, lw=0.8, ls="--", zorder=0)
            text = self.texts.get(name)
            if text:
                one.set_title(text, loc="right", fontsize=7, color=MUTED)
            _dress(one, panel)
        legend(figure)


@dataclass(frozen=True, slots=True)
class Span:
    """A request's state over time, seconds."""

    panel: str
    request: str
    state: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class SpanPlot:
    """A row a request, a panel a policy."""

    spans: list[Span]
    notes: tuple[str, ...] = ()
    height_in: float = 3.6
    header: Sequence[str] = ("panel", "request", "state", "start_s", "end_s")

    def rows(self) -> list[tuple[Any, ...]]:
        """A span a row."""
        return [(s.panel, s.request, s.state, s.start_s, s.end_s) for s in self.spans]

    def labels(self) -> list[str]:
        """States have colours of their own."""
        return []

    def draw(self, figure: Figure, palette: Palette) -> None:  # noqa: ARG002
        """Bars from left to right."""
        names = list(dict.fromkeys(span.panel for span in self.spans))
        lanes = list(dict.fromkeys(span.request for span in self.spans))
        axes = figure.subplots(1, len(names), squeeze=False, sharey=True).ravel()
        for name, one in zip(names, axes, strict=True):
            for state, colour in STATES.items():
                spans = [s for s in self.spans if s.panel == name and s.state == state]
                one.barh(
                    [lanes.index(s.request) for s in spans],
                    [s.end_s - s.start_s for s in spans],
                    left=[s.start_s for s in spans],
                    height=0.8,
                    color=colour,
                )
            one.set_title(name, loc="right")
            one.set_xlabel("time (s)")
            tidy(one)
        axes[0].set_ylabel("request, by arrival")
        axes[0].set_ylim(len(lanes) - 0.4, -0.6)
        legend(figure, [(Patch(color=colour), state) for state, colour in STATES.items()])


def _dress(axes: Axes, panel: Panel, bare: bool = False) -> None:
    axes.set_xlabel("" if bare else panel.x)
    axes.set_ylabel(fill(panel.y, WRAP))
    if panel.log_x:
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
    if panel.log_y:
        axes.set_yscale("log")
        log_ticks(axes.yaxis)
    if panel.level is not None:
        axes.axhline(panel.level, color=MUTED, lw=0.8, ls="--")
    tidy(axes)


def _error(value: float, low: float | None, high: float | None) -> list[list[float]] | None:
    return None if low is None or high is None else [[value - low], [high - value]]
