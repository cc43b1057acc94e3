"""1,000 streams at once through `python run.py mode=serve`, on scripted tokens: is one lost or
mixed up with another, does memory stay flat, what does the server add to a stream's time?

`python -m experiments.serving.streams [--streams 1000] [--tokens 100] [--rounds 4] [--kill 200]`

Every stream has a seed of its own and its text is compared token by token. Killed: a process with
its clients gets SIGKILL mid-stream. Added: in a second server whose steps take longer than this
machine needs for them and whose clients come one after the other, the client's time from the
request to the first and to the last token less the engine's own of the same request, from its
arrival there (requests.csv).
"""

import argparse
import asyncio
import csv
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from experiments.serving.server_process import FAKE, ServerProcess, idle, serving
from experiments.serving.stream_client import Answer, faults, kill_clients, run_streams

LEAVE_S = 2.0  # that the engine has to let go of clients who left


def main() -> None:
    """For 1 and 2 front ends: rounds of streams, then killed clients; prints as it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100, help="of a stream")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kill", type=int, default=200, help="clients killed mid-stream")
    parser.add_argument("--step-s", type=float, default=0.1, help="scripted time, added latency")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    for workers in given.workers:
        print(f"{workers} front ends, {given.streams} streams")
        with tempfile.TemporaryDirectory() as folder:
            burst(Path(folder), given, workers)
        with tempfile.TemporaryDirectory() as folder:
            added(Path(folder), given, workers)


def burst(folder: Path, given: argparse.Namespace, workers: int) -> None:
    """Rounds of streams all at once, each with a slot, in a pool that has no room for all of their
    tokens; then clients are killed. No figures: they keep the records of 20,000 requests."""
    with serving(folder, *FAKE, *slots(given, workers), "~sinks.figures") as server:
        print(f"  MiB of engine, front ends: start {_mib(server)}")
        for number in range(given.rounds):
            one_round(server, given, number)
        preempted = server.engine()["totals"]["preemptions"]
        leave_s = _kill(server, given.kill)
        print(f"  {preempted} preemptions; {given.kill} killed: pages free after {leave_s:.2f} s")


def added(folder: Path, given: argparse.Namespace, workers: int) -> None:
    """What the server adds to a stream's time."""
    room = f"engine.pool_tokens={512 * given.streams}"
    options = (room, f"executor.step_s={given.step_s}", "records=requests")
    with serving(folder, *FAKE, *slots(given, workers), *options) as server:
        tokens, spread_s, streams = 50, 25 * given.step_s, given.streams // 4
        work = run_streams(server.port, range(streams), tokens, spread_s)
        answers = asyncio.run(work)
    print(f"  {streams} spread over {spread_s:g} s, {tokens} tokens: {len(faults(answers))} faults")
    print_added(answers, folder / "requests.csv")


def slots(given: argparse.Namespace, workers: int) -> tuple[str, ...]:
    """Overrides: everyone may run at once."""
    return (
        f"server.workers={workers}",
        f"engine.max_num_seqs={given.streams}",
        f"engine.max_num_batched_tokens={4 * given.streams}",
    )


def one_round(server: ServerProcess, given: argparse.Namespace, number: int) -> None:
    """All streams at once."""
    seeds = range(number * given.streams, (number + 1) * given.streams)
    middle: list[str] = []
    timer = threading.Timer(1.0, lambda: middle.append(_mib(server)))
    timer.start()
    start_s = time.perf_counter()
    answers = asyncio.run(run_streams(server.port, seeds, given.tokens))
    wall_s = time.perf_counter() - start_s
    timer.join()
    wrong = faults(answers)
    kinds = {kind: sum(one.fault == kind for one in wrong) for kind in ("lost", "mixed", "refused")}
    print(f"  round {number}: {kinds}, {wall_s:.1f} s, middle {middle[0]}, end {_mib(server)}")
    for one in wrong[:3]:
        print(f"    seed {one.seed}: {one.fault}: {one.detail}")
    server.wait_for(idle, LEAVE_S)


def print_added(answers: list[Answer], requests: Path) -> None:
    """Median and 99th percentile of what the server added, ms."""
    with requests.open(encoding="utf-8", newline="") as file:
        rows = {row["request_id"]: row for row in csv.DictReader(file)}
    whole = [answer for answer in answers if not answer.fault]
    for name, column in (("first", "ttft_s"), ("last", "e2e_s")):
        own = np.array([float(rows[answer.request_id][column]) for answer in whole])
        seen = np.array([getattr(answer, f"{name}_s") - answer.sent_s for answer in whole])
        p50, p99 = np.percentile(1000 * (seen - own), [50, 99])
        share = np.median(seen / own)
        print(
            f"  to the {name} token: engine p50 {1000 * np.median(own):.0f} ms,"
            f" added p50 {p50:.0f} ms, p99 {p99:.0f} ms, ratio p50 {share:.2f}"
        )


def _kill(server: ServerProcess, clients: int) -> float:
    killed_s = kill_clients(
        server.port, clients, 3000, lambda: server.wait_for(lambda now: now["running"] > 0, 10)
    )
    server.wait_for(idle, LEAVE_S)
    return time.monotonic() - killed_s


def _mib(server: ServerProcess) -> str:
    return " ".join(f"{mib:.0f}" for mib in server.rss_mib())


if __name__ == "__main__":
    main()
