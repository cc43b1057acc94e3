"""What a prefix cache saved in each run of a sweep, beside what it could have saved.

    python -m experiments.prefix_cache.table outputs/sweeps/FOLDER...

The requests are made again from each run's config; the bounds take them in the order in which they
were admitted, one after another, on a cache of the pool's size (plugins/shared/cache_bounds.py).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conf.instantiate import build
from core.errors import ConfigError
from core.records import RequestRecord
from core.request import Request
from experiments.paper.folders import Run, find_runs
from plugins.shared.cache_bounds import CacheBounds, cache_bounds, prompt_uses
from plugins.shared.session import closed_loop
from plugins.shared.tokenizer_file import read_tokenizer

HEADER = (
    *("load", "policy", "cache", "seed", "prompt tokens", "hit rate", "MIN", "infinite"),
    *("prefilled", "evicted pages", "TTFT p50, s", "TTFT p90, s", "E2E mean, s", "duration, s"),
)


def main(folders: Sequence[str]) -> int:
    """Print one row a run as Markdown; returns the exit code."""
    try:
        runs, _ = find_runs(Path(folder) for folder in folders)
        for run in runs:
            check_completed(run)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    bounds: dict[tuple[str, int, int, int], CacheBounds] = {}
    lines = [HEADER, ("---",) * len(HEADER)]
    for run in sorted(runs, key=lambda run: run.position):
        kv = run.summary["kv"]
        key = (run.summary["workload"], run.seed, kv["pool_pages"], kv["page_size"])
        if key not in bounds:  # of runs that differ in policy or cache alone, those of the first
            bounds[key] = bounds_of(run)
        lines.append(row(run, bounds[key]))
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return 0


def check_completed(run: Run) -> None:
    """Raises ConfigError, with the run's first error, if no request of it completed."""
    requests = run.summary["requests"]
    if not requests["completed"]:
        rule = "completed requests of a run must be >= 1, got 0"
        raise ConfigError(f"{rule} in {run.folder}; its first error: {requests['first_error']}")


def row(run: Run, bounds: CacheBounds) -> tuple[str, ...]:
    """The cells of a run. Bounds count tokens over prompt tokens, as the hit rate does."""
    summary, tokens, latency = run.summary, run.summary["tokens"], run.summary["latency"]
    share = summary["kv"]["page_size"] / tokens["prompt"]
    return (
        *(summary["workload"], summary["policy"]),
        *(summary["hooks"]["build_prefix_cache"], str(run.seed), f"{tokens['prompt']:,}"),
        f"{summary['hit_rate']:.1%}",
        f"{bounds.belady_min * share:.1%}",
        f"{bounds.infinite * share:.1%}",
        f"{tokens['prefill']:,}",
        f"{summary['evicted_pages']:,}",
        f"{latency['ttft_s']['p50']:.3f}",
        f"{latency['ttft_s']['p90']:.3f}",
        f"{latency['e2e_s']['mean']:.2f}",
        f"{summary['duration_s']:,.1f}",
    )


def bounds_of(run: Run) -> CacheBounds:
    """Bounds of a run's requests at its pool."""
    kv = run.summary["kv"]
    return cache_bounds(prompt_uses(requests_of(run), kv["page_size"]), kv["pool_pages"])


def requests_of(run: Run) -> list[Request]:
    """A run's requests in the order of their admission, made again; those of a closed loop follow
    from the recorded ends of the others."""
    workload = build("workload", run.config["workload"])
    name = run.config["executor"].get("tokenizer")
    tokenizer = None if name is None else read_tokenizer("executor.tokenizer", name)
    ready = list(workload.requests(tokenizer, run.manifest["executor"]["vocab_size"], run.seed))
    columns = run.requests
    loop = closed_loop(workload)
    if loop is not None:
        facts = ("request_id", "client", "arrival_s", "prompt_tokens", "finished_s")
        for name, client, arrival_s, prompt_tokens, finished_s in zip(
            *(columns[fact] for fact in facts), strict=True
        ):
            ended = RequestRecord(str(name), str(client), arrival_s, int(prompt_tokens))
            ended.finished_s = float(finished_s)
            ready.extend(loop.follow_up(ended))
    by_id = {request.request_id: request for request in ready}
    order = np.lexsort((columns["arrival_s"], columns["admitted_s"]))
    return [by_id[str(name)] for name in columns["request_id"][order]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
