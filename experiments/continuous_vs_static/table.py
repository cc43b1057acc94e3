"""Aggregate throughput of continuous over request-level batching, seed by seed, beside its bound:
python -m experiments.continuous_vs_static.table FOLDER_OF_THE_SWEEP.

Bound: a batch of requests that start together runs as long as its longest output, and its places
are in use for the mean of them. Max / mean over the run's outputs is what refilling each place at
once can gain at most, if a step takes the same time whatever it holds."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from core.config import require
from core.errors import ConfigError
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs

BASELINE = "static"
HEADER = ("seed", "static, tokens/s", "{}, tokens/s", "ratio", "bound max/mean", "ratio / bound")
THROUGHPUT = "output_tokens_per_s"


def main(folders: Sequence[Path]) -> str:
    """A table for each other batching, a row a seed and the mean. Raises ConfigError without a run
    of request-level batching, or where seeds differ in their requests."""
    found, _ = find_runs(folders)
    runs: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in found:
        runs[run.summary["hooks"]["decide_batch"]][run.seed] = run
    require(BASELINE in runs, "FOLDER", "a sweep with batching=static", sorted(runs))
    tables = [
        table(runs[BASELINE], others, name) for name, others in runs.items() if name != BASELINE
    ]
    return "\n\n".join(tables)


def table(baseline: dict[int, Run], others: dict[int, Run], name: str) -> str:
    """Rows of the seeds that both have."""
    rows, ratios, shares = [], [], []
    for seed in sorted(baseline.keys() & others.keys()):
        pair = [baseline[seed], others[seed]]
        bound = longest_over_mean(pair)
        before, after = (float(run.summary["throughput"][THROUGHPUT]) for run in pair)
        ratios.append(after / before)
        shares.append(after / before / bound)
        figures = [f"{before:,.0f}", f"{after:,.0f}", f"{ratios[-1]:.2f}", f"{bound:.2f}"]
        rows.append([str(seed), *figures, f"{shares[-1]:.2f}"])
    rows.append(["mean", "", "", spread(ratios, "{:.2f}"), "", spread(shares, "{:.2f}")])
    return markdown([one.format(name) for one in HEADER], rows)


def longest_over_mean(pair: Sequence[Run]) -> float:
    """Of the outputs of a run. Raises ConfigError if the two runs emitted different ones."""
    outputs = [sorted(run.requests["output_tokens"][run.completed].tolist()) for run in pair]
    folder = str(pair[1].folder)
    require(outputs[0] == outputs[1], "FOLDER", "runs with the same outputs for a seed", folder)
    return float(max(outputs[0]) / (sum(outputs[0]) / len(outputs[0])))


if __name__ == "__main__":
    try:
        print(main([Path(name) for name in sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
