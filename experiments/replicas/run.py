"""What does a second replica give, and what does a client notice when one is killed?

    python -m experiments.replicas.run --model llama_8b --kill          # two GPUs
    python -m experiments.replicas.run --model tiny_llama --streams 16 --running 8 --prompt 8 \\
        --output 64 128 --warm-s 5 --seconds 5 --workers 1 --clients 1 --kill device=cpu \\
        engine.pool_tokens=16384 mode.lock=off                          # on a CPU

`python run.py mode=serve` with one replica, then with two, each under as many streams a replica at
all times: more than it runs at once, so that it never lacks work. Tokens count when clients have
them, over `--seconds` after `--warm-s`. With --kill, SIGKILL for a replica of the last server
afterwards, while streams go on. Arguments such as `key=value` go to run.py's config."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from core.config import require
from experiments.replicas.streams import NAME, Clients, Seen, Shape
from experiments.serving.chaos import is_back, workers
from experiments.serving.router_cost import cpu_s
from experiments.serving.server_process import ServerProcess, serving

PATIENCE_S = 240.0  # for replicas to be ready
POLL_S = 0.1
SETTLE_S = 3.0  # under load, after a replica is back
Line = dict[str, Any]


def main() -> int:
    """Measure what the arguments ask for; a JSON line each, then a table."""
    given, overrides = _parser().parse_known_args()
    check(given)
    lines = []
    for count in given.replicas:
        kills = given.kill and count == given.replicas[-1] and count > 1
        with tempfile.TemporaryDirectory() as folder:
            line = measured(Path(folder), given, overrides, count, kills)
        lines.append(line)
        print(json.dumps(line), flush=True)
    if given.out is not None:
        with open(given.out, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)
    print(report(lines))
    return int(any(line["faults"] for line in lines))


def check(given: argparse.Namespace) -> None:
    """Raises ConfigError for numbers that no client could serve, before a server starts."""
    least, most = given.output
    for name in ("streams", "clients", "prompt"):
        require(getattr(given, name) >= 1, f"--{name}", ">= 1", getattr(given, name))
    require(min(given.replicas) >= 1, "--replicas", ">= 1", given.replicas)
    require(1 <= least <= most, "--output", "two numbers >= 1, ascending", given.output)
    require(given.seconds > 0, "--seconds", "> 0", given.seconds)


def measured(
    folder: Path, given: argparse.Namespace, overrides: list[str], count: int, kills: bool
) -> Line:
    """One server under load."""
    begin_s = time.monotonic()
    streams = given.streams * count
    settings = [f"model={given.model}", f"replicas={count}", f"server.workers={given.workers}"]
    settings += [f"engine.max_num_seqs={given.running}", f"server.model_name={NAME}"]
    settings += [f"engine.max_num_batched_tokens={given.budget}", "progress=false"]
    settings += [f"engine.max_model_len={given.prompt + given.output[1]}"]
    settings += [f"server.max_queue={2 * streams}", "records=summary", "~sinks.figures"]
    with serving(folder / "run", *settings, *overrides) as server:
        listed = ready(server, count)
        line: Line = {"model": given.model, "replicas": count, "streams": streams}
        line["start_s"] = round(time.monotonic() - begin_s, 1)
        shape = Shape(given.prompt, tuple(given.output))
        clients = Clients(server.port, streams, given.clients * count, shape)
        time.sleep(given.warm_s)
        processes = [server.process.pid, *server.fronts]
        processes += [one["process_id"] for one in listed]
        from_s, used = clients.now_s(), cpu_s(processes)
        time.sleep(given.seconds)
        to_s, used = clients.now_s(), cpu_s(processes) - used
        told = workers(server)
        death = killed(server, clients) if kills else {}
        seen = clients.end()
    rate = seen.tokens_a_second(from_s, to_s)
    busy = used / (to_s - from_s)
    fronts = busy[1 : 1 + len(server.fronts)]
    line |= {
        "tokens_s": round(rate, 1),
        "whole": seen.whole,
        "cut": seen.cut,
        "faults": len(seen.faults),
        "first_faults": seen.faults[:3],
        "main_cores": round(float(busy[0]), 3),
        "main_us_a_token": round(1e6 * float(busy[0]) / rate, 2) if rate else None,
        "busiest_front_cores": round(float(fronts.max()), 3),
        "replica_cores": [round(float(one), 3) for one in busy[1 + len(fronts) :]],
        "busiest_client_cores": round(seen.cpu_s / clients.now_s(), 3),
        "requests": {one["id"]: one["requests"] for one in told},
        "devices": {one["id"]: one.get("device") for one in told},
    }
    return line | (after_death(seen, death) if death else {})


def ready(server: ServerProcess, count: int) -> list[Line]:
    """/v1/workers once all are ready; a server without a router lists none. Raises TimeoutError."""
    until_s = time.monotonic() + PATIENCE_S
    while count > 1:
        lines = workers(server)
        if sum(line["state"] == "ready" for line in lines) == count:
            return lines
        if time.monotonic() > until_s:
            raise TimeoutError(f"not ready: {lines}; {server.messages[-2000:]}")
        time.sleep(POLL_S)
    return []


def killed(server: ServerProcess, clients: Clients) -> Line:
    """SIGKILL one replica, and wait until it is back and has requests again. Raises TimeoutError
    if it does not come."""
    line = workers(server)[0]
    death: Line = {"killed": line["id"], "had": line["requests"], "killed_at_s": clients.now_s()}
    os.kill(line["process_id"], signal.SIGKILL)
    until_s = time.monotonic() + PATIENCE_S
    while not is_back(server, line):
        if time.monotonic() > until_s:
            raise TimeoutError(f"replica {line['id']} is not back; {server.messages[-2000:]}")
        time.sleep(POLL_S)
    death["back_at_s"] = clients.now_s()
    time.sleep(SETTLE_S)
    return death | {"moved": server.engine()["totals"]["failovers"]}


def after_death(seen: Seen, death: Line) -> Line:
    """The longest wait for a token in streams that lived through it, beside that of all others;
    tokens a second until the replica was back, and then."""
    died_s, back_s = death["killed_at_s"], death["back_at_s"]
    through = [wait for begin, end, wait in seen.waits if begin < died_s < end]
    others = [wait for begin, end, wait in seen.waits if not begin < died_s < end]
    return {
        "killed": death["killed"],
        "had": death["had"],
        "moved": death["moved"],
        "back_s": round(back_s - died_s, 2),
        "lived_through": len(through),
        "wait_s": percentiles(through),
        "wait_of_others_s": percentiles(others),
        "tokens_s_meanwhile": round(seen.tokens_a_second(died_s, back_s), 1),
        "tokens_s_after": round(seen.tokens_a_second(back_s, back_s + SETTLE_S), 1),
    }


def percentiles(values: list[float]) -> list[float]:
    """p50, p99 and the largest; none of none."""
    return [round(float(one), 3) for one in np.percentile(values, [50, 99, 100])] if values else []


def report(lines: list[Line]) -> str:
    """A row a server, and what became of a killed replica."""
    rows = ["| model | replicas | streams | output tokens/s | ratio | not whole | main process |"]
    rows[0] += " busiest front end |"
    rows.append("|---" * 8 + "|")
    alone = {line["model"]: line["tokens_s"] for line in lines if line["replicas"] == 1}
    for line in lines:
        one = alone.get(line["model"])
        ratio = f"{line['tokens_s'] / one:.3f}" if one else ""
        rows.append(
            f"| {line['model']} | {line['replicas']} | {line['streams']:,}"
            f" | {line['tokens_s']:,.0f} | {ratio}"
            f" | {line['faults']} of {line['whole'] + line['faults']:,}"
            f" | {line['main_cores']:.2f} cores, {line['main_us_a_token']} µs a token"
            f" | {line['busiest_front_cores']:.2f} cores |"
        )
    for line in lines:
        if "killed" in line:
            rows.append(
                f"\nReplica {line['killed']} of {line['model']} killed with {line['had']} requests:"
                f" {line['moved']} moved, {line['faults']} streams failed, ready again after"
                f" {line['back_s']} s; longest wait for a token, s: p50, p99, max"
                f" {line['wait_s']} of {line['lived_through']} streams that lived through it,"
                f" {line['wait_of_others_s']} of others;"
                f" {line['tokens_s_meanwhile']:,.0f} tokens/s until then,"
                f" {line['tokens_s_after']:,.0f} after."
            )
        for name, device in line["devices"].items():
            rows.append(f"\nReplica {name} of {line['replicas']}, {line['model']}: {device}")
    return "\n".join(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_0_6b", help="a file of conf/model")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=768, help="open at all times, a replica")
    parser.add_argument("--running", type=int, default=512, help="at once, a replica")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, nargs=2, default=[256, 768], help="tokens, evenly")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--workers", type=int, default=16, help="front ends of the server")
    parser.add_argument("--clients", type=int, default=3, help="client processes, a replica")
    parser.add_argument("--warm-s", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kill", action="store_true", help="a replica, after the last measurement")
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
