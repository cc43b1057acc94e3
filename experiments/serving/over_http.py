"""The comparison workload `decode` through HTTP beside the same engine in one process.

    python -m experiments.serving.over_http --model llama_8b --workers 8 --clients 4 --rounds 3

Every request is a stream of its own, all at once, from client processes that only read and stamp
bytes; they parse when all have ended. wall_s: from the first request sent to the last byte read. A
round's prompts are no other's to the prefix cache (cache_salt), and a first round of long prompts
warms the server up. `shared`: chunks that carry more than one token, of all chunks with tokens."""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from experiments.engines.workloads import Load, load, warm_up_load, write
from experiments.serving.server_process import ROOT, idle, serving
from experiments.serving.stream_client import unchunked

START_IN_S = 1.0  # from handing the work to the client processes; they are connected by then
LIMIT_S = 300.0
NAME = "bench"  # of the model, to clients


@dataclass(frozen=True, slots=True)
class Part:
    """What one client process saw. Times of time.monotonic(), which processes share."""

    sent_s: float
    last_s: float
    tokens: int
    chunks: int
    shared: int


def main() -> None:
    """In one process, then over HTTP; prints as it goes, and a JSON line a round to --out."""
    given = _parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inside = [] if given.without_engine else in_process(folder, given)
        outside = over_http(folder, given)
    if inside:
        ratio = median(one["wall_s"] for one in outside) / median(inside)
        print(f"over HTTP / in one process: {ratio:.3f}")
    if given.out is not None:
        lines = [{"model": given.model, "workers": given.workers} | one for one in outside]
        lines += [{"model": given.model, "in_process": True, "wall_s": wall} for wall in inside]
        with open(given.out, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)


def in_process(folder: Path, given: argparse.Namespace) -> list[float]:
    """Wall times of the rounds without a server."""
    out = folder / "engine.jsonl"
    words = ["--model", given.model, "--workloads", "decode", "--rounds", str(given.rounds)]
    words += ["--scale", str(given.scale), "--out", str(out), *given.overrides]
    command = [sys.executable, "-m", "experiments.engines.run", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=2)
    walls = [json.loads(line)["wall_s"] for line in out.read_text("utf-8").splitlines()]
    print(f"in one process: {', '.join(f'{wall:.3f}' for wall in walls)} s", flush=True)
    return walls


def over_http(folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The rounds through a server of the same settings."""
    decode = load("decode", given.scale)
    file = write(decode, folder / "decode.jsonl")
    settings = ["+experiment=engines", f"model={given.model}", f"workload.path='{file}'"]
    settings += [f"server.workers={given.workers}", f"server.model_name={NAME}", *given.overrides]
    rounds = []
    clients = ProcessPoolExecutor(given.clients, mp_context=get_context("spawn"))
    with clients, serving(folder / "run", *settings) as server:
        one_round(clients, given.clients, server.port, warm_up_load(0.0), "warm-up")
        for number in range(given.rounds):
            server.wait_for(idle, LIMIT_S)
            found = one_round(clients, given.clients, server.port, decode, f"round {number}")
            rounds.append(found)
            print(f"over HTTP: {found}", flush=True)
    return rounds


def one_round(
    clients: ProcessPoolExecutor, num_clients: int, port: int, work: Load, salt: str
) -> dict[str, Any]:
    """All requests at once. Raises RuntimeError for a stream that is not whole."""
    bodies = [
        _request(prompt, length, salt)
        for prompt, length in zip(work.prompts, work.outputs, strict=True)
    ]
    start_s = time.monotonic() + START_IN_S
    shares = [bodies[index::num_clients] for index in range(num_clients)]
    waiting = [clients.submit(read_all, port, share, start_s) for share in shares if share]
    parts = [one.result(LIMIT_S) for one in waiting]
    tokens, chunks = sum(part.tokens for part in parts), sum(part.chunks for part in parts)
    if tokens != sum(work.outputs):
        raise RuntimeError(f"output tokens must be {sum(work.outputs)}, got {tokens}")
    return {
        "wall_s": round(max(part.last_s for part in parts) - min(part.sent_s for part in parts), 4),
        "tokens": tokens,
        "chunks": chunks,
        "shared": round(sum(part.shared for part in parts) / chunks, 4),
    }


def read_all(port: int, requests: Sequence[bytes], start_s: float) -> Part:
    """In a client process: send all at `start_s` and read to the end of each."""
    return uvloop.run(_read_all(port, requests, start_s))


async def _read_all(port: int, requests: Sequence[bytes], start_s: float) -> Part:
    pairs = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in requests))
    await asyncio.sleep(max(0.0, start_s - time.monotonic()))
    sent_s = time.monotonic()
    for (_, writer), request in zip(pairs, requests, strict=True):
        writer.write(request)
    answers = await asyncio.gather(*(reader.read() for reader, _ in pairs))
    last_s = time.monotonic()
    counts = [count for answer in answers for count in token_counts(answer)]
    return Part(sent_s, last_s, sum(counts), len(counts), sum(count > 1 for count in counts))


def token_counts(answer: bytes) -> list[int]:
    """Tokens of each chunk that has any, by its text of ids. Raises RuntimeError for an answer that
    is refused or ends early."""
    head, _, body = answer.partition(b"\r\n\r\n")
    data = unchunked(body)
    if b" 200 " not in head.partition(b"\r\n")[0] or not data.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"a stream is not whole: {answer[:300]!r} ... {answer[-300:]!r}")
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    texts = ["".join(one["text"] for one in event["choices"]) for event in events]
    return [len(text.split()) for text in texts if text]


def _request(prompt: list[int], tokens: int, salt: str) -> bytes:
    fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields | {"model": NAME, "stream": True, "cache_salt": salt})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3_0_6b", help="a file of conf/model")
    parser.add_argument("--workers", type=int, default=8, help="front ends of the server")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 256 requests")
    parser.add_argument("--without-engine", action="store_true", help="only over HTTP")
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    parser.add_argument("overrides", nargs="*", default=[], help="of run.py, for both")
    return parser


if __name__ == "__main__":
    main()
