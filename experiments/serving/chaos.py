"""Does a client notice that replicas die? `python run.py mode=serve replicas=4` with a small model
on the CPU, many streams at all times, and SIGKILL for one replica after the other.

`python -m experiments.serving.chaos [--replicas 4] [--streams 200] [--seconds 180]`

Every answer is compared, choice by choice, with that of a server of one engine without a router,
which nobody disturbs: same seeds, temperature 0.8, two choices in every fourth call, penalties in
every third. A replica is killed when at least twice the time has passed that the one before took to
be ready again.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.serving.sampled_client import Asked, Got, stream
from experiments.serving.server_process import ServerProcess, serving

VOCAB = 128  # of conf/model/tiny_llama.yaml
TINY = (
    "model=tiny_llama",
    "device=cpu",
    "engine.pool_tokens=65536",
    "engine.max_num_seqs=256",
    "mode.lock=off",
    "~sinks.figures",
)
PATIENCE_S = 120.0  # for a replica to be ready
POLL_S = 0.1
LEAST_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Death:
    """A replica that was killed: with how many requests, and after what time it was ready again."""

    replica: str
    requests: int
    back_s: float


def main() -> None:
    """Run it, and print what clients saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--streams", type=int, default=200, help="at once")
    parser.add_argument("--tokens", type=int, default=300, help="of a stream, at most")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--exact", action="store_true", help="engine.deterministic: bits, slowly")
    given = parser.parse_args()
    options = (*TINY, f"engine.deterministic={str(given.exact).lower()}")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *options, f"replicas={given.replicas}") as server,
    ):
        got, deaths = disturbed(server, given)
        totals = server.engine()["totals"]
    print(f"{len(deaths)} deaths, {totals['failovers']} requests moved; {shares(deaths)}")
    asked = [Asked(one.number, given.tokens, VOCAB) for one in got]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *options) as server:
        reference = asyncio.run(all_of(server.port, asked, model(server), given.streams))
    print_comparison(got, reference)


def disturbed(server: ServerProcess, given: argparse.Namespace) -> tuple[list[Got], list[Death]]:
    """Clients for so many seconds, each sending call after call, while replicas die."""
    wait_for_ready(server, given.replicas)
    ended = threading.Event()
    deaths: list[Death] = []
    killer = threading.Thread(target=kill_in_turn, args=(server, ended, deaths))
    killer.start()
    until_s = time.monotonic() + given.seconds
    numbers = itertools.takewhile(lambda _: time.monotonic() < until_s, itertools.count())
    asked = (Asked(number, given.tokens, VOCAB) for number in numbers)
    try:
        got = asyncio.run(all_of(server.port, asked, model(server), given.streams))
    finally:
        ended.set()
        killer.join()
    return got, deaths


async def all_of(
    port: int, asked: Iterator[Asked] | list[Asked], model: str, at_once: int
) -> list[Got]:
    """Calls, `at_once` of them at all times."""
    queue = iter(asked)
    got: list[Got] = []

    async def client() -> None:
        for one in queue:
            got.append(await stream(port, one, model))

    await asyncio.gather(*[client() for _ in range(at_once)])
    return got


def kill_in_turn(server: ServerProcess, ended: threading.Event, deaths: list[Death]) -> None:
    """Kill one replica after the other, each when all are ready and it has requests."""
    names = [line["id"] for line in workers(server)]
    wait_s = LEAST_UP_S
    for name in itertools.cycle(names):
        if ended.wait(wait_s):
            return
        line = next(one for one in workers(server) if one["id"] == name)
        killed_s = time.monotonic()
        os.kill(line["process_id"], signal.SIGKILL)
        while not (back := is_back(server, line)) and not ended.wait(POLL_S):
            pass
        back_s = time.monotonic() - killed_s
        if back:
            deaths.append(Death(name, line["requests"], back_s))
        wait_s = max(back_s, LEAST_UP_S)  # with the time it was away: twice that in all


def is_back(server: ServerProcess, before: dict[str, Any]) -> bool:
    """Whether a replica is ready in another process than `before`."""
    line = next(one for one in workers(server) if one["id"] == before["id"])
    return line["state"] == "ready" and line["process_id"] != before["process_id"]


def workers(server: ServerProcess) -> list[dict[str, Any]]:
    """/v1/workers."""
    with urllib.request.urlopen(f"{server.url}/v1/workers", timeout=30) as answer:
        lines: list[dict[str, Any]] = json.load(answer)["data"]
    return lines


def wait_for_ready(server: ServerProcess, num: int) -> None:
    """Until so many replicas are. Raises TimeoutError."""
    until_s = time.monotonic() + PATIENCE_S
    while sum(line["state"] == "ready" for line in workers(server)) < num:
        if time.monotonic() > until_s:
            raise TimeoutError(f"not ready: {workers(server)}")
        time.sleep(POLL_S)


def model(server: ServerProcess) -> str:
    """The id that clients name it by."""
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def shares(deaths: list[Death]) -> str:
    """What the deaths were like."""
    if not deaths:
        return "nobody died"
    back_s = [death.back_s for death in deaths]
    had = [death.requests for death in deaths]
    return (
        f"a replica had {min(had)} to {max(had)} requests and was back after"
        f" {min(back_s):.1f} to {max(back_s):.1f} s"
    )


def print_comparison(got: list[Got], reference: list[Got]) -> None:
    """Faults, differences, waits."""
    expected = {one.number: one for one in reference}
    failed = [one for one in got if one.fault]
    broken = [one for one in reference if one.fault]
    other = [one for one in got if not one.fault and one.answer != expected[one.number].answer]
    tokens = sum(one.answer[2] for one in got if not one.fault)
    print(f"streams {len(got)}, tokens {tokens}: failed {len(failed)}, other tokens {len(other)}")
    print(f"undisturbed: failed {len(broken)}")
    for one in failed[:3]:
        print(f"  number {one.number}: {one.fault}")
    for one in other[:3]:
        print(f"  number {one.number}: {one.answer} is {expected[one.number].answer} undisturbed")
    reasons = Counter(reason for one in got for reason in one.reasons.values())
    print(f"ends {dict(reasons)}")
    for name, answers in (("replicas die", got), ("undisturbed", reference)):
        gaps = np.array([one.gap_s for one in answers if not one.fault])
        p50, p99, most = np.percentile(gaps, [50, 99, 100])
        print(f"longest wait in a stream, {name}: p50 {p50:.2f} s, p99 {p99:.2f} s, max {most:.2f}")


if __name__ == "__main__":
    main()
