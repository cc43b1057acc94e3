"""Hit rates of every shipped evictor and cache admission beside the bounds, on Mooncake's traces.

    python -m experiments.cache_bounds.table                      # all: some minutes on one core
    python -m experiments.cache_bounds.table --trace synthetic --capacity 3000,6000

Prints Markdown: one table of bounds and one of policies a trace. A block holds 512 tokens.
"""

import argparse
import time
from collections.abc import Callable, Sequence

from core.request import Request
from experiments.cache_bounds.replay import (
    AdmitsToCache,
    BuildsEvictor,
    OracleAdmission,
    mooncake,
    replay,
    uses_of,
)
from plugins.cache.admit_all import AdmitAll
from plugins.cache.fifo import Fifo
from plugins.cache.gdsf import Gdsf
from plugins.cache.lfu import Lfu
from plugins.cache.lru import Lru
from plugins.cache.min_length import MinLength
from plugins.cache.s3_fifo import S3Fifo
from plugins.cache.second_hit import SecondHit
from plugins.cache.slru import Slru
from plugins.cache.workload_aware import WorkloadAware
from plugins.shared.cache_bounds import CacheBounds, PrefixTrace, prefix_trace, trace_bounds
from plugins.workload.mooncake import BLOCK_TOKENS

TRACES = ("conversation", "synthetic")
CAPACITIES = (1_000, 3_000, 6_000, 10_000, 30_000)  # blocks
EVICTORS: dict[str, Callable[[], BuildsEvictor]] = {
    "fifo": Fifo,
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "gdsf": Gdsf,
    "s3_fifo": S3Fifo,
    "workload_aware": WorkloadAware,
}
MIN_BLOCKS = 8192 // BLOCK_TOKENS  # of min_length, whose 1,024 tokens keep no prompt out here


def main() -> None:
    """Print the tables and how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", choices=TRACES, action="append")
    parser.add_argument("--capacity", default=",".join(map(str, CAPACITIES)), help="blocks")
    options = parser.parse_args()
    capacities = [int(text) for text in options.capacity.split(",")]
    for name in options.trace or TRACES:
        start = time.perf_counter()
        requests = mooncake(name)
        trace = prefix_trace(uses_of(requests))
        bounds = [trace_bounds(trace, capacity) for capacity in capacities]
        print(f"\n## {name}: {len(requests):,} requests, {trace.pages_asked:,} blocks\n")
        print(bounds_table(bounds))
        print(f"\nBounds: {time.perf_counter() - start:.1f} s with reading.\n")
        print(policies_table(requests, trace, bounds))
        print(f"\nAll: {time.perf_counter() - start:.0f} s.", flush=True)


def bounds_table(bounds: Sequence[CacheBounds]) -> str:
    """One row a capacity: the bounds, and where LRU loses."""
    header = (
        *("blocks", "LRU", "oracle admission + LRU", "MIN", "infinite"),
        *("lost to admission", "to eviction", "to capacity"),
    )
    rows = [
        [f"{one.capacity:,}"]
        + [f"{one.rate(hits):.4f}" for hits in (one.lru, one.oracle_admission_lru)]
        + [f"{one.rate(hits):.4f}" for hits in (one.belady_min, one.infinite)]
        + [f"{lost:.4f}" for lost in (one.lost_to_admission, one.lost_to_eviction)]
        + [f"{one.lost_to_capacity:.4f}"]
        for one in bounds
    ]
    return markdown(header, rows)


def policies_table(
    requests: Sequence[Request], trace: PrefixTrace, bounds: Sequence[CacheBounds]
) -> str:
    """One row a pair of cache admission and evictor, one column a capacity."""
    recurring = trace.recurring()
    admissions: dict[str, Callable[[], AdmitsToCache]] = {
        "admit_all": AdmitAll,
        "second_hit": lambda: SecondHit(block_tokens=1),
        "min_length": lambda: MinLength(MIN_BLOCKS),
        "(oracle)": lambda: OracleAdmission(recurring),
    }
    rows = []
    for admission, admits in admissions.items():
        for evictor, evicts in EVICTORS.items():
            hits = [replay(requests, one.capacity, evicts(), admits()) for one in bounds]
            rates = [one.rate(found) for one, found in zip(bounds, hits, strict=True)]
            rows.append([admission, evictor, *(f"{rate:.4f}" for rate in rates)])
    rows.append(["", "MIN", *(f"{one.rate(one.belady_min):.4f}" for one in bounds)])
    rows.append(["", "infinite", *(f"{one.rate(one.infinite):.4f}" for one in bounds)])
    return markdown(("admission", "evictor", *(f"{one.capacity:,}" for one in bounds)), rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
