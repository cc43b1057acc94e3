"""Routers beside each other, and the bound: python -m experiments.routing.table FOLDER ...

One table for each workload, number of replicas and rate, least mean TTFT first. A run of one engine
whose step time is `pooled` is the bound of the replicas it stands for: one machine with their
memory and speed together. What the columns mean: plugins/mode/route_totals.py."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from core.errors import ConfigError
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs, numbers, select

# column -> (path in summary.json, scale, format)
COLUMNS = {
    "TTFT mean, s": ("latency.ttft_s.mean", 1, "{:.2f}"),
    "p50": ("latency.ttft_s.p50", 1, "{:.2f}"),
    "p99": ("latency.ttft_s.p99", 1, "{:.1f}"),
    "E2E p50, s": ("latency.e2e_s.p50", 1, "{:.2f}"),
    "E2E p99": ("latency.e2e_s.p99", 1, "{:.1f}"),
    "hit rate, %": ("hit_rate", 100, "{:.1f}"),
    "load CV": ("replicas.load_cv", 1, "{:.2f}"),
    "busy CV": ("replicas.busy_cv", 1, "{:.2f}"),
    "regret mean, s": ("replicas.regret_s.mean", 1, "{:.2f}"),
    "best, %": ("replicas.best_share", 100, "{:.0f}"),
}
FIRST = "latency.ttft_s.mean"
Setting = tuple[str, int, str]  # workload, replicas, rate


def main(folders: Sequence[Path]) -> str:
    """The tables, means over seeds with 95 % intervals where there are several."""
    found, _ = find_runs(folders)
    settings: dict[Setting, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in found:
        settings[_setting(run)][_router(run)].append(run)
    return "\n\n".join(
        f"{name}, {replicas} replicas, {rate}\n\n{table(routers)}"
        for (name, replicas, rate), routers in sorted(settings.items())
    )


def table(routers: dict[str, list[Run]]) -> str:
    """One row a router, least mean TTFT first."""
    order = sorted(routers, key=lambda name: mean(_numbers(routers[name], FIRST, 1)))
    rows = []
    for router in order:
        cells = []
        for path, scale, form in COLUMNS.values():
            values = _numbers(routers[router], path, scale)
            cells.append(spread(values, form) if values else "")
        rows.append([router, *cells])
    return markdown(["router", *COLUMNS], rows)


def _setting(run: Run) -> Setting:
    pooled = run.summary["simulated"].get("pooled")
    replicas = pooled or run.summary["replicas"]["count"]
    workload: dict[str, Any] = run.config["workload"]
    rate = workload.get("rate")
    named = f"{rate:g} sessions/s" if rate else f"rate {workload.get('rate_scale', 1):g}"
    return str(run.summary["workload"]), int(replicas), named


def _router(run: Run) -> str:
    if run.summary["simulated"].get("pooled"):
        return "(pooled: the bound)"
    oracle = " (oracle)" if run.policy.endswith("(oracle)") else ""
    return str(run.summary["replicas"]["router"]) + oracle


def _numbers(runs: Sequence[Run], path: str, scale: float) -> list[float]:
    """One number of each run's summary; none where one has no such thing: a bound has no replicas,
    a run with mode.regret=false no regret."""
    if path.startswith("replicas") and any(select(run.summary, path) is None for run in runs):
        return []
    return numbers(runs, path, scale)


if __name__ == "__main__":
    try:
        print(main([Path(name) for name in sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
