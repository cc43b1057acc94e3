"""Aggregate throughput of continuous over request-level batching, seed by seed, beside its bound:
python -m experiments.continuous_vs_static.table FOLDER...

Bound: a batch of requests that start together runs as long as its longest output, and its places
are in use for the mean of them. Max / mean over the run's outputs is what refilling each place at
once can gain at most, if a step takes the same time whatever it holds. Mean step: beside it, since
steps that hold more rows take longer."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from core.config import require
from core.errors import ConfigError
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs, select

BASELINE = "static"
HEADER = (
    *("seed", "static, tokens/s", "{}, tokens/s", "ratio", "bound max/mean", "ratio / bound"),
    *("static, rows and ms a step", "{}, rows and ms a step"),
)
THROUGHPUT = "output_tokens_per_s"
Runs = dict[str, dict[int, Run]]  # batching -> seed -> run


def main(folders: Sequence[Path]) -> str:
    """For each setting a table for each other batching, a row a seed and the mean. Raises
    ConfigError for a setting without request-level batching, or where seeds differ in their
    requests."""
    found, _ = find_runs(folders)
    settings: dict[str, Runs] = defaultdict(lambda: defaultdict(dict))
    for run in found:
        settings[setting(run)][run.summary["hooks"]["decide_batch"]][run.seed] = run
    return "\n\n".join(tables(name, runs) for name, runs in settings.items())


def tables(name: str, runs: Runs) -> str:
    """The tables of one setting, under its name."""
    require(BASELINE in runs, "FOLDER", "a sweep with batching=static", sorted(runs))
    others = [key for key in runs if key != BASELINE]
    return "\n\n".join([name, *(table(runs[BASELINE], runs[key], key) for key in others)])


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
        rows.append([str(seed), *figures, f"{shares[-1]:.2f}", *map(step, pair)])
    rows.append(["mean", "", "", spread(ratios, "{:.2f}"), "", spread(shares, "{:.2f}"), "", ""])
    return markdown([one.format(name) for one in HEADER], rows)


def setting(run: Run) -> str:
    """Workload, and what stands for the device: the simulated model, or the executor."""
    executor = run.summary["hooks"]["build_executor"]
    model = str(select(run.config, "executor.step_time._target_") or executor).rpartition(".")[2]
    return f"{run.summary['workload']}, {model.lower()}"


def step(run: Run) -> str:
    """Mean rows of a step, weighted by time, and its mean length."""
    rows, seconds = run.summary["batch"]["batch_mean"], run.summary["steps"]["mean_s"]
    return f"{rows:.1f}, {1e3 * seconds:.2f}"


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
