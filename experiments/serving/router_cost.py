"""What does a router cost? 1,000 streams at once on scripted tokens, through one engine without a
router and through replicas behind one, in one run.

`python -m experiments.serving.router_cost [--streams 1000] [--replicas 2 4] [--step-s 0.1]`

CPU time of each process, all its threads: of a token event from streams of `--tokens` tokens less
that of streams of one token; of a request from the latter. Without a router the main process holds
the engine and the server's hub; with one it holds the router and the hub. First token: what a
client waits on an idle server, one stream after the other.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.serving.chaos import wait_for_ready, workers
from experiments.serving.server_process import FAKE, ServerProcess, idle, serving
from experiments.serving.stream_client import faults, run_streams

SETTLE_S = 1.0
PATIENCE_S = 60.0
FIRSTS = 100  # streams for the time of the first token
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a number of replicas, 0 = no router. main_us, replicas_us: CPU of a token event; of a
    request: request_us of the main process, replica_request_us of all replicas together."""

    replicas: int
    main_us: float
    replicas_us: float
    request_us: float
    replica_request_us: float
    first_ms: tuple[float, float]
    wall_s: float


def main() -> None:
    """One line for each number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--step-s", type=float, default=0.1, help="scripted")
    given = parser.parse_args()
    costs = [measured(given, replicas) for replicas in (0, *given.replicas)]
    alone = costs[0]
    print("replicas  main us/token  (ratio)  replicas us/token  main us/request  (ratio)", end="")
    print("  replicas us/request  first ms p50, p99  wall s")
    for cost in costs:
        print(
            f"{cost.replicas or 'no router':>9} {cost.main_us:13.2f}"
            f" {cost.main_us / alone.main_us:8.2f} {cost.replicas_us:18.2f}"
            f" {cost.request_us:16.0f} {cost.request_us / alone.request_us:8.2f}"
            f" {cost.replica_request_us:20.0f}"
            f"  {cost.first_ms[0]:9.1f}, {cost.first_ms[1]:5.1f} {cost.wall_s:8.1f}"
        )


def measured(given: argparse.Namespace, replicas: int) -> Cost:
    """Run all streams with one token each, then with many; then some, one after the other."""
    share = -(-given.streams // max(replicas, 1))
    options = [
        f"engine.max_num_seqs={share}",
        f"engine.max_num_batched_tokens={4 * share}",
        f"engine.pool_tokens={256 * share}",
        f"executor.step_s={given.step_s}",
        "executor.check=false",
        "~sinks.figures",
    ]
    if replicas:
        options += [f"replicas={replicas}", "+router=round_robin"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *FAKE, *options) as server,
    ):
        if replicas:
            wait_for_ready(server, replicas)
        processes = [line["process_id"] for line in workers(server)]
        ids = [server.process.pid, *processes]
        round_of(server, 0, given.streams, 1, ids)  # what is loaded on first use
        one, _ = round_of(server, 1, given.streams, 1, ids)
        many, wall_s = round_of(server, 2, given.streams, given.tokens, ids)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *FAKE, *options, "executor.step_s=0.001") as server,
    ):
        if replicas:
            wait_for_ready(server, replicas)
        first_ms = firsts(server)
    per_request = one / given.streams * 1e6
    per_token = (many - one) / (given.streams * (given.tokens - 1)) * 1e6
    return Cost(
        replicas,
        per_token[0],
        per_token[1:].sum(),
        per_request[0],
        per_request[1:].sum(),
        first_ms,
        wall_s,
    )


def round_of(
    server: ServerProcess, number: int, streams: int, tokens: int, processes: Sequence[int]
) -> tuple["np.ndarray[tuple[int], np.dtype[np.float64]]", float]:
    """CPU seconds of the processes for streams all at once, and how long these took."""
    seeds = range(number * streams, (number + 1) * streams)
    before, start_s = cpu_s(processes), time.perf_counter()
    answers = asyncio.run(run_streams(server.port, seeds, tokens))
    wall_s = time.perf_counter() - start_s
    used = cpu_s(processes) - before
    if wrong := faults(answers):
        raise RuntimeError(f"{len(wrong)} streams failed: {wrong[0]}")
    server.wait_for(idle, PATIENCE_S)
    time.sleep(SETTLE_S)
    return used, wall_s


def firsts(server: ServerProcess) -> tuple[float, float]:
    """ms to the first token, p50 and p99, one stream after the other."""
    times = []
    for seed in range(FIRSTS + 10):
        (answer,) = asyncio.run(run_streams(server.port, [seed], 2))
        times.append(1000 * (answer.first_s - answer.sent_s))
    p50, p99 = np.percentile(times[10:], [50, 99])
    return float(p50), float(p99)


def cpu_s(processes: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """CPU seconds that each has used, in user and system mode."""
    used = []
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        used.append((int(fields[11]) + int(fields[12])) / TICKS)
    return np.array(used)


if __name__ == "__main__":
    main()
