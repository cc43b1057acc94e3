"""CPU time of a front end for each token event, beside a bare Starlette echo of the same bytes.

`python -m experiments.serving.front_end [--streams 256] [--tokens 200] [--step-ms 20]`

Both run uvicorn in a process of its own and stream as many tokens, one a step to each client; the
front end gets them over its channel, decodes them and builds chunks, the echo makes one constant
chunk for each in its own process. A third process reads. Printed: microseconds of the serving
process's CPU time for each token, start-up left out, and the ratio; `shared` is the share of writes
that carried several steps (steps come too fast for this machine if it is not small).
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

from plugins.model.smollm2_files import model_folder
from plugins.server.channel import EngineEnd
from plugins.server.client import Ended, Facts
from plugins.server.limits import Limits
from plugins.server.messages import Abort, Goodbye, Report, StepNews, Submit
from plugins.server.settings import Settings
from plugins.server.sse import listen
from plugins.server.worker import make_server, serve_worker
from plugins.shared.event_loop import run_loop

CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"smollm2","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STATE = {
    "ready": True,
    "reason": "",
    "waiting": 0,
    "running": 0,
    "requests": 0,
    "slots": 1 << 20,
    "idle_s": 0.0,
    "pool": {},
    "totals": {},
    "last_steps": [],
}


def main() -> None:
    """Measure both, in turn and twice, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    load = (options.streams, options.tokens, options.step_ms / 1000)
    for _ in range(options.rounds):
        echo_us = echo(*load)
        front_us, shared = front_end(*load)
        print(
            f"{options.streams} streams: echo {echo_us:.1f} us/token, front end {front_us:.1f}"
            f" us/token, ratio {front_us / echo_us:.2f}, shared {shared:.1%}"
        )


def front_end(streams: int, tokens: int, step_s: float) -> tuple[float, float]:
    """Microseconds a token, and the share of writes with several steps."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(False))
    facts = Facts("smollm2", 49152, 8192, 1 << 20, tokenizer, "default", {}, 0, Limits())
    ids = tokenizer("The quick brown fox jumps over the lazy dog. " * tokens)["input_ids"][:tokens]
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/channel"
        channel = EngineEnd(address)
        arguments = (Settings(port=port), listener, address, facts)
        process = multiprocessing.get_context("spawn").Process(target=serve_worker, args=arguments)
        process.start()
        engine = _Engine(channel, ids, step_s)
        engine.wait_for_front()
        reader = _reader(port, streams, tokens)
        used_s = engine.run(streams, process.pid)
        reader.join()
        page = _metrics_while(channel, port)
        channel.send(process.pid, Goodbye("over"))
        process.join(10)
        channel.close()
        listener.close()
    shared = {kind: float(_line(page, f'stream_chunks_total{{kind="{kind}"}}')) for kind in KINDS}
    return used_s / (streams * tokens) * 1e6, shared["shared"] / sum(shared.values())


KINDS = ("single", "shared")


class _Engine:
    """Gives each stream a token a step, all at once."""

    def __init__(self, channel: EngineEnd, ids: list[int], step_s: float) -> None:
        self.channel = channel
        self.ids = ids
        self.step_s = step_s

    def wait_for_front(self) -> None:
        while not self.channel.connected:
            self.channel.receive(0.1)
        (self.front,) = self.channel.connected
        self.channel.send(self.front, Report(STATE, False, 0, 0))

    def run(self, streams: int, pid: int) -> float:
        """Wait for all streams, then time the tokens. Returns CPU seconds."""
        keys: list[int] = []
        while len(keys) < streams:
            messages, _ = self.channel.receive(0.1)
            keys += [message.key for _, message in messages if isinstance(message, Submit)]
            self.channel.send(self.front, Report(STATE, False, len(keys), 0))
        time.sleep(0.5)
        before_s, due_s = cpu_s(pid), time.monotonic()
        for index, token in enumerate(self.ids):
            last = index + 1 == len(self.ids)
            news = StepNews(keys, [token] * streams, submitted=streams)
            if last:
                news.finish_reasons = dict.fromkeys(range(streams), "length")
                news.ended = [(key, Ended(("length",))) for key in keys]
            self.channel.send(self.front, news)
            due_s += self.step_s
            while (left_s := due_s - time.monotonic()) > 0:
                messages, _ = self.channel.receive(left_s)
                assert not any(isinstance(message, Abort) for _, message in messages)
        time.sleep(0.5)
        return cpu_s(pid) - before_s


def echo(streams: int, tokens: int, step_s: float) -> float:
    """Microseconds a token of a StreamingResponse that yields a constant."""
    listener = listen("127.0.0.1", 0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (listener, streams, tokens, step_s, theirs)
    process = context.Process(target=_echo_process, args=arguments)
    process.start()
    reader = _reader(listener.getsockname()[1], streams, tokens)
    used_s = float(ours.recv())
    reader.join()
    process.kill()
    process.join()
    listener.close()
    return used_s / (streams * tokens) * 1e6


def _echo_process(
    listener: socket.socket, streams: int, tokens: int, step_s: float, done: Connection
) -> None:
    run_loop(_echo(listener, streams, tokens, step_s, done))


async def _echo(
    listener: socket.socket, streams: int, tokens: int, step_s: float, done: Connection
) -> None:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    queues: list[asyncio.Queue[bytes]] = []

    async def events(queue: "asyncio.Queue[bytes]") -> AsyncIterator[bytes]:
        while chunk := await queue.get():
            yield chunk

    async def handler(request: Request) -> StreamingResponse:
        await request.body()
        queues.append(asyncio.Queue())
        return StreamingResponse(events(queues[-1]), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", handler, methods=["POST"])])
    serving = asyncio.ensure_future(make_server(app, False).serve(sockets=[listener]))
    while len(queues) < streams:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    before_s, due_s = time.process_time(), time.monotonic()
    for _ in range(tokens):
        for queue in queues:
            queue.put_nowait(CHUNK)
        due_s += step_s
        await asyncio.sleep(max(due_s - time.monotonic(), 0))
    for queue in queues:
        queue.put_nowait(b"")
    await asyncio.sleep(0.5)
    done.send(time.process_time() - before_s)
    await serving


def _reader(port: int, streams: int, tokens: int) -> multiprocessing.Process:
    process = multiprocessing.Process(target=lambda: asyncio.run(_read_all(port, streams, tokens)))
    process.start()
    return process


async def _read_all(port: int, streams: int, tokens: int) -> None:
    body = (
        '{"model":"smollm2","messages":[{"role":"user","content":"hi"}],"stream":true,'
        f'"max_tokens":{tokens},"ignore_eos":true}}'
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        chunks, tail = 0, b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            part = await reader.read(1 << 16)
            assert part, "the connection ended early"
            chunks += part.count(b'"content":"')
            tail = (tail + part)[-16:]
        writer.close()
        assert chunks >= tokens // 2, f"{chunks} chunks"

    await asyncio.gather(*(read() for _ in range(streams)))


def _metrics_while(channel: EngineEnd, port: int) -> str:
    channel.receive(0.2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def _line(page: str, name: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"tritium_{name}")).split()[1]


def cpu_s(pid: int | None) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    main()
