"""Compares the policies of a sweep: python experiments/preemption/table.py FOLDER_OF_THE_SWEEP."""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

# column -> (path in summary.json, format)
COLUMNS = {
    "preemptions": ("preemptions", "{:,.0f}"),
    "requests hit": ("requests_preempted", "{:,.0f}"),
    "recompute tax": ("recompute_tax", "{:.1%}"),
    "output tokens/s": ("throughput.output_tokens_per_s", "{:,.0f}"),
    "TTFT p50, s": ("latency.ttft_s.p50", "{:.2f}"),
    "ITL p99, ms": ("latency.itl_s.p99", "{:.1f}"),
    "E2E mean, s": ("latency.e2e_s.mean", "{:.2f}"),
    "E2E p99, s": ("latency.e2e_s.p99", "{:.2f}"),
}
MILLISECONDS = "ITL p99, ms"


def main(folder: Path) -> None:
    """One row a policy: the mean over seeds, and the standard deviation between them."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(folder.glob("*/summary.json")):
        summary = json.loads(file.read_text(encoding="utf-8"))
        runs[summary["policy"]].append(summary)
    if not runs:
        sys.exit(f"no summary.json in the folders of {folder}")
    table = Table("policy", "runs", *COLUMNS, title=str(folder))
    for policy, summaries in sorted(runs.items()):
        table.add_row(policy, str(len(summaries)), *(cell(name, summaries) for name in COLUMNS))
    Console(width=160).print(table)


def cell(name: str, summaries: list[dict[str, Any]]) -> str:
    """Mean ± standard deviation of a column over runs."""
    path, form = COLUMNS[name]
    scale = 1000 if name == MILLISECONDS else 1
    values = [scale * float(select(summary, path)) for summary in summaries]
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + spread


def select(summary: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path."""
    value: Any = summary
    for key in path.split("."):
        value = value[key]
    return value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
