"""The figures of a run, drawn without a display and without global state."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from core.records import RequestRecord
from plugins.shared.metrics import completed, token_gaps_s, ttft_s
from plugins.sink.series import Series

# Okabe-Ito colours: distinct under colour blindness
LAYERS = {
    "pages_request": ("requests", "#0072B2"),
    "pages_in_use": ("cached, in use", "#56B4E9"),
    "pages_evictable": ("cached, evictable", "#A5D8C4"),
    "pages_free": ("free", "#EEEEEE"),
}
LINE, MARK, SECOND, MUTED = "#0072B2", "#D55E00", "#E69F00", "#555555"
MAX_CURVE_POINTS = 2000
LONG_TAIL = 30  # a maximum beyond so many medians is drawn on a logarithmic axis


def memory_figure(series: Series, title: str) -> Figure:
    """KV pages by owner, with preemptions marked, above batch size and queue length; against
    seconds."""
    figure = Figure(figsize=(9, 5.6), dpi=120, layout="constrained")
    pages, batch = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _pages(pages, series)
    _batch(batch, series)
    batch.set_xlabel("time since start (s)")
    batch.set_xlim(series.edges_s[0], max(series.edges_s[-1], series.edges_s[0] + 1e-9))
    for axes in (pages, batch):
        _tidy(axes)
    return figure


def latency_figure(records: Sequence[RequestRecord], title: str) -> Figure:
    """Cumulative distributions of TTFT (a sample a request) and ITL (a sample a gap), completed
    only."""
    figure = Figure(figsize=(9, 3.8), dpi=120, layout="constrained")
    first, gaps = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    done = completed(records)
    times = [ttft for record in done if (ttft := ttft_s(record)) is not None]
    _cumulative(first, np.array(times), "time to first token", "requests")
    _cumulative(gaps, token_gaps_s(done), "inter-token latency", "gaps")
    first.set_ylabel("cumulative share")
    return figure


def _pages(axes: Axes, series: Series) -> None:
    edges = series.edges_s
    bottom = np.zeros(len(edges) - 1)
    for name, (label, colour) in LAYERS.items():
        layer = series.levels[name]
        axes.stairs(bottom + layer, edges, baseline=bottom, fill=True, color=colour, label=label)
        bottom = bottom + layer
    top = float(bottom.max()) if len(bottom) else 1.0
    counts = series.counts["preemptions"]
    at = (edges[:-1] + edges[1:])[counts > 0] / 2
    total = int(counts.sum())
    if total:
        label = f"preemption ({total})" if total == 1 else f"preemptions ({total})"
        axes.plot(at, np.full(len(at), top * 1.045), "|", color=MARK, ms=8, mew=1.2, label=label)
    axes.set_ylim(0, top * 1.09)
    axes.set_ylabel("KV pages")
    axes.set_title("KV memory", loc="left", fontsize=10, fontweight="bold")
    _legend(axes)


def _batch(axes: Axes, series: Series) -> None:
    for name, colour, label in (
        ("waiting", SECOND, "requests waiting"),
        ("batch", LINE, "sequences in the step"),
    ):
        axes.stairs(
            series.levels[name], series.edges_s, baseline=None, color=colour, lw=1.3, label=label
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("count")
    axes.set_title("Batch and queue", loc="left", fontsize=10, fontweight="bold")
    _legend(axes)


def _cumulative(axes: Axes, samples_s: NDArray[np.float64], name: str, unit: str) -> None:
    """An empirical distribution in milliseconds or seconds, with p50, p90 and p99 named on the
    curve."""
    axes.set_title(
        f"{name} ({len(samples_s):,} {unit})", loc="left", fontsize=10, fontweight="bold"
    )
    axes.set_ylim(0, 1.02)
    _tidy(axes)
    axes.grid(axis="x", color="#E6E6E6", lw=0.6)
    if not len(samples_s):
        axes.text(0.5, 0.5, "none", ha="center", color=MUTED, transform=axes.transAxes)
        axes.set_xticks([])
        return
    scale, label = (1e3, "ms") if np.percentile(samples_s, 99) < 1 else (1.0, "s")
    ranks = np.linspace(0, 1, min(len(samples_s), MAX_CURVE_POINTS) + 1)
    curve = np.quantile(samples_s * scale, ranks, method="inverted_cdf")
    axes.step(curve, ranks, where="post", color=LINE, lw=1.6)
    marks = [(q, float(np.percentile(samples_s, q)) * scale) for q in (50, 90, 99)]
    for q, value in marks:
        axes.plot([value], [q / 100], "o", color=MARK, ms=4, zorder=3)
    text = "\n".join(f"p{q} {_three_digits(value):>6} {label}" for q, value in marks)
    axes.text(
        0.97,
        0.06,
        text,
        ha="right",
        va="bottom",
        transform=axes.transAxes,
        fontsize=9,
        family="monospace",
        color=MARK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )
    if curve[-1] > LONG_TAIL * marks[0][1] > 0 and curve[0] > 0:
        axes.set_xscale("log")
        axes.set_xlabel(f"{label} (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel(label)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _legend(axes: Axes) -> None:
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 5}
    axes.legend(**place, frameon=False, fontsize=8.5, handlelength=1.2, borderaxespad=0.1)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#E6E6E6", lw=0.6)
    axes.set_axisbelow(True)
