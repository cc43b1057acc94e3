"""The table at the end of a run: what was measured, and which plugin decided what."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console as Terminal
from rich.markup import escape
from rich.table import Table

from core.hookspecs import hookimpl
from core.records import RequestRecord, StepRecord
from plugins.shared.run_info import RunInfo, SinkQuery

PLAIN_WIDTH = 100  # columns when the output is no terminal
WIDE = 98  # columns from which the results stand side by side
LATENCIES = (
    ("first token (TTFT)", "ttft_s"),
    ("token gap (ITL)", "itl_s"),
    ("per token (TPOT)", "tpot_s"),
    ("end to end (E2E)", "e2e_s"),
    ("queueing", "queue_s"),
)
ABSENT = "–"


class Console:
    """Prints a run's summary to standard output. show_plugins: with the table of who decided."""

    def __init__(self, show_plugins: bool = True) -> None:
        self.show_plugins = show_plugins

    @hookimpl
    def build_sink(self, query: SinkQuery) -> "ConsoleSink":
        """Print when the run is over."""
        terminal = Terminal()
        if not terminal.is_terminal:
            terminal = Terminal(width=PLAIN_WIDTH)
        return ConsoleSink(terminal, Path(query.folder), self.show_plugins)


class ConsoleSink:
    """Needs no record, only the summary."""

    def __init__(self, terminal: Terminal, folder: Path, show_plugins: bool) -> None:
        self._terminal = terminal
        self._folder = folder
        self._show_plugins = show_plugins

    def step(self, record: StepRecord) -> None:
        """Nothing to do."""

    def request(self, record: RequestRecord) -> None:
        """Nothing to do."""

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Print the tables."""
        show = self._terminal.print
        show()
        show(
            f"[bold]{escape(run.name)}[/]  policy [bold]{escape(run.policy)}[/]  seed {run.seed}",
            highlight=False,
        )
        if summary.get("simulated"):
            show(escape(simulated_by(summary["simulated"])), highlight=False)
        if summary.get("bounds"):
            show(beside_bounds(summary), highlight=False)
        if summary.get("replicas"):
            show(routed_by(summary["replicas"]), highlight=False)
        show(_results(summary, self._terminal.width >= WIDE))
        show(_latencies(summary["latency"]))
        if self._show_plugins and summary.get("plugins"):
            show(_plugins(summary["plugins"]))
        if summary["requests"].get("first_error"):
            show(f"[red]first error:[/] {escape(summary['requests']['first_error'])}")
        show(f"run folder: {escape(str(self._folder))}", highlight=False, soft_wrap=True)


def simulated_by(simulated: dict[str, Any]) -> str:
    """What stood for the device, and how far its steps are from measured ones."""
    names = " ".join(str(simulated[key]) for key in ("device", "model") if simulated.get(key))
    error = simulated.get("error") or {}
    if error.get("mape") is None:
        worth = "never compared with a device"
    else:
        worth = f"error {_share(error['mape'])} over {error['points']} steps held out of the fit"
    of = f" ({names})" if names else ""
    return f"simulated by {simulated['source']}{of}, {worth}"


def beside_bounds(summary: dict[str, Any]) -> str:
    """A simulated run beside what its requests could have had (plugins/mode/bounds.py)."""
    bounds = summary["bounds"]
    slow = bounds["e2e_slowdown"]
    parts = [
        f"load {_share(bounds['load'])} of what any schedule could serve",
        f"E2E {slow['p50']:.2f} (p50) and {slow['p99']:.2f} (p99) times that of a request alone",
    ]
    if bounds["min_hit_rate"] is not None:
        found, best = _share(summary["hit_rate"]), _share(bounds["min_hit_rate"])
        without_end = _share(bounds["infinite_hit_rate"])
        parts.append(f"hit rate {found} of {best} (MIN), {without_end} (cache without end)")
    return "bounds: " + "; ".join(parts)


def routed_by(replicas: dict[str, Any]) -> str:
    """How requests were spread over the replicas (plugins/mode/route_totals.py)."""
    parts = []
    if replicas["load_cv"] is not None:
        parts.append(f"load varies by {_share(replicas['load_cv'])} between them")
    regret = replicas["regret_s"]
    if regret is not None and regret["mean"] is not None:
        later = f"{_seconds(regret['mean'])} (mean) and {_seconds(regret['p99'])} (p99)"
        parts.append(f"starts {later} after the earliest possible")
    return f"{replicas['count']} replicas behind {replicas['router']}" + (
        f": {'; '.join(parts)}" if parts else ""
    )


def _results(summary: dict[str, Any], wide: bool) -> Table:
    """What came out and what memory did: side by side, or below each other in a narrow terminal."""
    left, right = _output_rows(summary), []
    if summary["steps"]["count"]:  # a client sees no engine
        left, right = left + _engine_rows(summary), _memory_rows(summary)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    for _ in range(1 + wide):
        table.add_column(style="cyan")
        table.add_column(justify="right")
    if wide:
        blank = ("", "")
        for first, second in zip_longest(left, right, fillvalue=blank):
            table.add_row(*first, *second)
    else:
        for row in (*left, *right):
            table.add_row(*row)
    return table


def _output_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rates, requests = summary["throughput"], summary["requests"]
    ended = {name: count for name, count in requests["finish_reasons"].items() if count}
    if requests["unfinished"]:
        ended["unfinished"] = requests["unfinished"]
    rows = [
        ("output tokens/s", _number(rates["output_tokens_per_s"])),
        ("total tokens/s", _number(rates["total_tokens_per_s"])),
        ("requests/s", _number(rates["requests_per_s"])),
        ("duration", _seconds(summary["duration_s"])),
        ("requests", f"{requests['completed']} of {requests['accepted']} completed"),
        ("finish reasons", ", ".join(f"{name} {count}" for name, count in ended.items()) or ABSENT),
    ]
    if summary["slo"]:
        rows.append(("requests within SLO", _share(summary["slo"]["attainment"])))
    if summary["measured"]["left_out"]:
        rows.append(("not counted", f"{summary['measured']['left_out']} (warm-up, drain)"))
    return rows


def _engine_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    batch, steps = summary["batch"], summary["steps"]
    host_us = [value for part, value in steps["host_us_mean"].items() if part in ("plan", "pack")]
    return [
        ("batch, mean / peak", _pair(batch["batch_mean"], batch["batch_peak"])),
        ("waiting, mean / peak", _pair(batch["waiting_mean"], batch["waiting_peak"])),
        ("steps", f"{steps['count']:,}, {_seconds(steps['mean_s'])} each"),
        ("planning a step", _seconds(sum(host_us) / 1e6 if host_us else None)),
    ]


def _memory_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    kv, waste, tokens = summary["kv"], summary["waste"], summary["tokens"]
    slots = kv["pool_pages"] * kv["page_size"]
    tax = _share(summary["recompute_tax"])
    return [
        ("KV pool", f"{slots:,} slots, pages of {kv['page_size']}"),
        ("KV live, mean / peak", f"{_share(kv['live_mean'])} / {_share(kv['live_peak'])}"),
        (
            "KV reserved, mean / peak",
            f"{_share(kv['reserved_mean'])} / {_share(kv['reserved_peak'])}",
        ),
        ("wasted slots", _share(waste["total"])),
        ("wasted slots, internal", _share(waste["internal"])),
        ("wasted slots, external", _share(waste["external"])),
        ("prefix hit rate", _share(summary["hit_rate"])),
        ("preemptions", f"{summary['preemptions']} (of {summary['requests_preempted']} requests)"),
        ("recomputed tokens", f"{tokens['recomputed']:,} (tax {tax})"),
        ("prefilled twice", f"{tokens['duplicate_prefill']:,} tokens"),
        ("evicted pages", f"{summary['evicted_pages']:,}"),
    ]


def _latencies(latency: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("latency", style="cyan")
    for name in ("p50", "p90", "p99", "mean", "max", "samples"):
        table.add_column(name, justify="right")
    for label, key in LATENCIES:
        values = latency[key]
        numbers = [_seconds(values[name]) for name in ("p50", "p90", "p99", "mean", "max")]
        table.add_row(label, *numbers, f"{values['count']:,}")
    return table


def _plugins(plugins: list[dict[str, Any]]) -> Table:
    """One row a hook and plugin; dim: asked, and never answered."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("hook", style="cyan")
    table.add_column("who decided")
    table.add_column("asked", justify="right")
    table.add_column("answered", justify="right")
    before = ""
    for entry in plugins:
        hook = entry["hook"]
        style = "dim" if hook.startswith(("decide_", "build_")) and not entry["answered"] else ""
        counts = f"{entry['asked']:,}", f"{entry['answered']:,}"
        table.add_row("" if hook == before else hook, escape(entry["plugin"]), *counts, style=style)
        before = hook
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f} %"


def _pair(mean: float | None, peak: int | None) -> str:
    return f"{ABSENT if mean is None else f'{mean:.1f}'} / {ABSENT if peak is None else peak}"


def _seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return ABSENT
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if value * scale >= 1 or value == 0:
            number = value * scale
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{value * 1e6:.0f} µs"
