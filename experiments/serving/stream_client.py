"""Many streams of /v1/completions at once over plain sockets, checked against the fake executor's
script token by token."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from plugins.executor.script import Script

VOCAB = 1000  # of conf/executor/fake.yaml
SCRIPT = Script(VOCAB, (), {})
LIMIT_S = 300.0


@dataclass(slots=True)
class Answer:
    """What one stream got. Times of time.perf_counter(), 0 = never; faults: what is wrong with it,
    by kind: lost (something is missing), mixed (something is another's) or refused."""

    seed: int
    request_id: str = ""
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    fault: str = ""
    detail: str = ""


def expected_text(seed: int, tokens: int) -> str:
    """What the fake executor says to a request of this seed, as ids."""
    zeros = np.zeros(tokens, np.int64)
    return "".join(f"{token} " for token in SCRIPT.tokens(zeros + seed, zeros, np.arange(tokens)))


async def run_streams(
    port: int, seeds: Sequence[int], tokens: int, spread_s: float = 0.0
) -> list[Answer]:
    """Each over a connection of its own; they start evenly over `spread_s`, 0 = all at once."""
    starts = [spread_s * index / len(seeds) for index in range(len(seeds))]
    works = (
        _stream(port, seed, tokens, start_s) for seed, start_s in zip(seeds, starts, strict=True)
    )
    return list(await asyncio.gather(*works))


async def _stream(port: int, seed: int, tokens: int, start_s: float) -> Answer:
    answer, parts = Answer(seed), []
    await asyncio.sleep(start_s)
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answer.sent_s = time.perf_counter()
            writer.write(request_bytes(seed, tokens))
            while part := await reader.read(1 << 16):
                if not answer.first_s and b'"text":"' in part:
                    answer.first_s = time.perf_counter()
                parts.append(part)
            answer.last_s = time.perf_counter()
            writer.close()
    except (OSError, TimeoutError) as error:
        answer.fault, answer.detail = "lost", f"{type(error).__name__}: {error}"
        return answer
    check(answer, b"".join(parts), tokens)
    return answer


def request_bytes(seed: int, tokens: int) -> bytes:
    """A prompt and a seed that no other stream has."""
    body = json.dumps(
        {
            "model": "fake",
            "prompt": [seed % VOCAB, seed // VOCAB % VOCAB, 7],
            "seed": seed,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def check(answer: Answer, raw: bytes, tokens: int) -> None:
    """Fill request_id and fault: every token in its place, one finish, usage, [DONE], one id."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        answer.fault, answer.detail = "refused", raw[:400].decode(errors="replace")
        return
    lines = unchunked(body).decode().split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(one) for one in data if one != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    ids = {event["id"] for event in events if "id" in event}  # an error has none
    text = "".join(choice["text"] for choice in choices)
    wanted = expected_text(answer.seed, tokens)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = events[-1].get("usage") if events else None
    answer.request_id = str(next(iter(ids), ""))
    whole = data[-1:] == ["[DONE]"] and reasons == ["length"] and usage is not None
    if len(ids) > 1 or not wanted.startswith(text):
        answer.fault, answer.detail = "mixed", f"ids {ids}, text {text[:200]!r}"
    elif text != wanted or not whole or usage["completion_tokens"] != tokens:
        answer.fault, answer.detail = (
            "lost",
            f"{len(text.split())} tokens, last: {data[-1] if data else None}",
        )


def unchunked(body: bytes) -> bytes:
    """The body of an answer with `Transfer-Encoding: chunked`."""
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:end], 16)):
        parts.append(body[end + 2 : end + 2 + size])
        at = end + size + 4
    return b"".join(parts)


def faults(answers: Iterable[Answer]) -> list[Answer]:
    """Those that are not right; a request id that two streams had is one, too."""
    known: set[str] = set()
    wrong = []
    for answer in answers:
        if not answer.fault and answer.request_id in known:
            answer.fault, answer.detail = "mixed", f"id {answer.request_id} twice"
        known.add(answer.request_id)
        if answer.fault:
            wrong.append(answer)
    return wrong


def kill_clients(
    port: int, clients: int, tokens: int, before_kill: Callable[[], object] = lambda: None
) -> float:
    """Open `clients` streams in a process, SIGKILL it once it has had the first bytes of each;
    returns time.monotonic() of the kill."""
    ours, theirs = get_context("fork").Pipe()
    process = get_context("spawn").Process(target=_hold, args=(port, clients, tokens, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            raise TimeoutError(f"{clients} clients did not all get an answer")
        ours.recv()
        before_kill()
    finally:
        assert process.pid is not None, "it was started"
        os.kill(process.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        process.join()
    return killed_s


def _hold(port: int, clients: int, tokens: int, told: Connection) -> None:
    def read(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            pass

    connections = []
    for seed in range(clients):
        connections.append(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        connections[-1].sendall(request_bytes(seed, tokens))
    for connection in connections:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200"), "a client was refused"
    for connection in connections[::2]:  # the others read no more: their sockets fill up
        threading.Thread(target=read, args=(connection,), daemon=True).start()
    told.send(clients)
    threading.Event().wait()
