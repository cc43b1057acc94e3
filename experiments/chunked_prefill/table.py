"""How long streams and prompts wait under each batching, from the runs of a sweep:
python -m experiments.chunked_prefill.table FOLDER."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs, numbers

# column -> (path in summary.json, scale, format)
COLUMNS = {
    "ITL p50, ms": ("latency.itl_s.p50", 1e3, "{:.1f}"),
    "ITL p99, ms": ("latency.itl_s.p99", 1e3, "{:.1f}"),
    "ITL max, ms": ("latency.itl_s.max", 1e3, "{:.0f}"),
    "TTFT p50, ms": ("latency.ttft_s.p50", 1e3, "{:.0f}"),
    "TTFT p99, ms": ("latency.ttft_s.p99", 1e3, "{:.0f}"),
    "E2E p50, s": ("latency.e2e_s.p50", 1, "{:.2f}"),
    "output tokens/s": ("throughput.output_tokens_per_s", 1, "{:,.0f}"),
}


def main(folders: Sequence[Path]) -> str:
    """One row a batching, least ITL p99 first; means over seeds with 95 % intervals."""
    found, _ = find_runs(folders)
    runs: dict[str, list[Run]] = defaultdict(list)
    for run in found:
        runs[run.summary["hooks"]["decide_batch"]].append(run)
    values = {
        name: [numbers(group, path, scale) for path, scale, _ in COLUMNS.values()]
        for name, group in runs.items()
    }
    forms = [form for *_, form in COLUMNS.values()]
    p99 = list(COLUMNS).index("ITL p99, ms")
    rows = [
        [name, str(len(runs[name])), *map(spread, values[name], forms)]
        for name in sorted(runs, key=lambda name: sum(values[name][p99]) / len(runs[name]))
    ]
    return markdown(["batching", "runs", *COLUMNS], rows)


if __name__ == "__main__":
    try:
        print(main([Path(name) for name in sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
