"""What each size of a page finds, wastes and costs, pool by pool, from the runs of a sweep:
python -m experiments.page_size.table FOLDER."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs, numbers, select

# column -> (path in summary.json, scale, format)
COLUMNS = {
    "hit rate, %": ("hit_rate", 100, "{:.1f}"),
    "waste, %": ("waste.total", 100, "{:.1f}"),
    "preemptions": ("preemptions", 1, "{:,.0f}"),
    "recompute tax, %": ("recompute_tax", 100, "{:.1f}"),
    "batch, mean": ("batch.batch_mean", 1, "{:.1f}"),
    "TTFT p50, s": ("latency.ttft_s.p50", 1, "{:.2f}"),
    "output tokens/s": ("throughput.output_tokens_per_s", 1, "{:,.0f}"),
}
Sizes = dict[int, list[Run]]  # page size -> runs


def main(folders: Sequence[Path]) -> str:
    """A table a pool; means over seeds with 95 % intervals."""
    found, _ = find_runs(folders)
    pools: dict[str, Sizes] = defaultdict(lambda: defaultdict(list))
    for run in found:
        pool = str(select(run.config, "engine.pool_tokens"))
        pools[pool][run.summary["kv"]["page_size"]].append(run)
    return "\n\n".join(
        f"engine.pool_tokens={pool}\n\n{table(sizes)}" for pool, sizes in sorted(pools.items())
    )


def table(sizes: Sizes) -> str:
    """One row a page size, smallest first."""
    rows = []
    for size, runs in sorted(sizes.items()):
        cells = [spread(numbers(runs, path, scale), form) for path, scale, form in COLUMNS.values()]
        rows.append([str(size), str(len(runs)), *cells])
    return markdown(["page, tokens", "runs", *COLUMNS], rows)


if __name__ == "__main__":
    try:
        print(main([Path(name) for name in sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
