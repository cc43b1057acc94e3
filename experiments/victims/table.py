"""Ranks victim policies in each pool, least recompute tax first, from the runs of a sweep:
python -m experiments.victims.table FOLDER.

What preempting costs at all is the distance to mc_sf+oracle: an admission that knows true lengths
and never has to preempt, under the same order of service."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from core.errors import ConfigError
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs, numbers

# column -> (path in summary.json, scale, format)
COLUMNS = {
    "preemptions": ("preemptions", 1, "{:,.0f}"),
    "requests hit": ("requests_preempted", 1, "{:,.0f}"),
    "recompute tax, %": ("recompute_tax", 100, "{:.1f}"),
    "TTFT p50, s": ("latency.ttft_s.p50", 1, "{:.2f}"),
    "E2E mean, s": ("latency.e2e_s.mean", 1, "{:.2f}"),
    "E2E p99, s": ("latency.e2e_s.p99", 1, "{:.2f}"),
    "output tokens/s": ("throughput.output_tokens_per_s", 1, "{:,.0f}"),
}
TAX = "recompute_tax"
THROUGHPUT = "throughput.output_tokens_per_s"
REFERENCE = "mc_sf+oracle"  # what its label begins with


def main(folders: Sequence[Path]) -> str:
    """A table for each size of the pool, means over seeds with 95 % intervals."""
    found, _ = find_runs(folders)
    pools: dict[int, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in found:
        slots = run.summary["kv"]["pool_pages"] * run.summary["kv"]["page_size"]
        pools[slots][run.policy].append(run)
    return "\n\n".join(
        f"Pool of {slots:,} slots\n\n{table(policies)}" for slots, policies in sorted(pools.items())
    )


def table(policies: dict[str, list[Run]]) -> str:
    """One row a policy, least tax first."""
    taxes = {policy: mean(numbers(runs, TAX)) for policy, runs in policies.items()}
    rates = {policy: mean(numbers(runs, THROUGHPUT)) for policy, runs in policies.items()}
    reference = [rate for policy, rate in rates.items() if policy.startswith(REFERENCE)]
    rows = []
    for policy in sorted(policies, key=taxes.__getitem__):
        runs = policies[policy]
        cells = [spread(numbers(runs, path, scale), form) for path, scale, form in COLUMNS.values()]
        share = f"{rates[policy] / reference[0]:.3f}" if reference else ""
        rows.append([policy, str(len(runs)), *cells, share])
    return markdown(["policy", "runs", *COLUMNS, f"share of {REFERENCE}'s"], rows)


if __name__ == "__main__":
    try:
        print(main([Path(name) for name in sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
