"""Waste and concurrency of contiguous and paged allocation, load by load, from the runs of a sweep:
python -m experiments.paged_vs_contiguous.table FOLDER...

A load is told by how long requests end up, as a share of the model's maximum. Mean use: of what
contiguous runs reserve for that maximum, the share that holds a token, over time; it is less than
the final length, since outputs grow. Where memory alone limits how many run, reserving what is used
lets 1 / mean use as many run."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from core.config import require
from core.errors import ConfigError
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs, numbers, select

BASELINE = "contiguous, the maximum"
# column -> (path in summary.json, scale, format)
COLUMNS = {
    "internal waste, %": ("waste.internal", 100, "{:.1f}"),
    "external waste, %": ("waste.external", 100, "{:.1f}"),
    "waste, %": ("waste.total", 100, "{:.1f}"),
    "KV live, %": ("kv.live_mean", 100, "{:.1f}"),
    "batch, mean": ("batch.batch_mean", 1, "{:.1f}"),
    "recompute tax, %": ("recompute_tax", 100, "{:.1f}"),
    "output tokens/s": ("throughput.output_tokens_per_s", 1, "{:,.0f}"),
}
BATCH, INTERNAL = "batch.batch_mean", "waste.internal"
HEADER = ("reserved", "runs", *COLUMNS, "times the batch", "1 / mean use")
Rows = Mapping[str, Sequence[Run]]


def main(folders: Sequence[Path]) -> str:
    """A table a load, shortest last; means over seeds with 95 % intervals. Raises ConfigError for a
    load without the baseline."""
    found, _ = find_runs(folders)
    loads: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in found:
        loads[str(select(run.config, "workload.prompt"))][reservation(run)].append(run)
    lengths = {
        load: mean(final_length(run) for runs in rows.values() for run in runs)
        for load, rows in loads.items()
    }
    parts = []
    for load in sorted(loads, key=lengths.__getitem__, reverse=True):
        require(BASELINE in loads[load], "FOLDER", f"a run of {BASELINE} of each load", load)
        title = f"Mean final length {lengths[load]:.1%} of the maximum"
        parts.append(f"{title}\n\n{table(loads[load])}")
    return "\n\n".join(parts)


def table(rows: Rows) -> str:
    """One row a way to reserve, largest batch last."""
    batches = {name: mean(numbers(runs, BATCH)) for name, runs in rows.items()}
    predicted = 1 / (1 - mean(numbers(rows[BASELINE], INTERNAL)))
    lines = []
    for name in sorted(rows, key=batches.__getitem__):
        runs = rows[name]
        cells = [spread(numbers(runs, path, scale), form) for path, scale, form in COLUMNS.values()]
        gain = f"{batches[name] / batches[BASELINE]:.2f}"
        shown = f"{predicted:.2f}" if name.startswith("pages") else ""
        lines.append([name, str(len(runs)), *cells, gain, shown])
    return markdown(HEADER, lines)


def reservation(run: Run) -> str:
    """What a request reserves: pages as it grows, or a run for the longest it may become."""
    if run.summary["hooks"]["build_allocator"] != "contiguous":
        return f"pages of {run.summary['kv']['page_size']}"
    return BASELINE if select(run.config, "workload.forced") else "contiguous, its own length"


def final_length(run: Run) -> float:
    """Mean prompt + output of the completed requests over the model's maximum."""
    tokens, done = run.summary["tokens"], run.summary["requests"]["completed"]
    most = int(select(run.config, "engine.max_model_len"))
    return float((tokens["prompt"] + tokens["output"]) / done / most)


if __name__ == "__main__":
    try:
        print(main([Path(name) for name in sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
