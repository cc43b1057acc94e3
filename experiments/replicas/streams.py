"""Client processes that hold a number of streams open: as one ends, the next begins. They count
tokens by the time at which they came, and keep every stream that is not whole."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import uvloop
from numpy.typing import NDArray

BIN_S = 0.1
BINS = 36_000
NAME = "bench"  # of the model, to clients
SPREAD_S = 1.0  # over which streams begin
END_S = 30.0
TEXT = re.compile(rb'"text":"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Shape:
    """Of every request: tokens of the prompt, and between which two numbers those of the output
    lie, evenly."""

    prompt: int
    outputs: tuple[int, int]

    def request(self, number: int) -> tuple[bytes, int]:
        """A call of its own for each number, and its output tokens."""
        random = np.random.default_rng(number)
        least, most = self.outputs
        tokens = int(random.integers(least, most + 1))
        body = {
            "model": NAME,
            "prompt": random.integers(8, 100, self.prompt).tolist(),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        lines = f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        return lines.encode() + raw, tokens


@dataclass(slots=True)
class Seen:
    """What clients saw. bins: tokens by BIN_S from the start; whole, cut: streams that ended, and
    that ran when all was over; faults: why each other one is not whole. waits: of each whole
    stream when it began, when it ended, and its longest wait for a token after the first, all in
    seconds from the start. cpu_s: of the busiest process."""

    bins: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    whole: int = 0
    cut: int = 0
    faults: list[str] = field(default_factory=list)
    waits: list[tuple[float, float, float]] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, other: "Seen") -> None:
        """Take in another process's."""
        self.bins += other.bins
        self.whole += other.whole
        self.cut += other.cut
        self.faults += other.faults
        self.waits += other.waits
        self.cpu_s = max(self.cpu_s, other.cpu_s)

    def tokens_a_second(self, begin_s: float, end_s: float) -> float:
        """Over whole bins."""
        first, last = round(begin_s / BIN_S), round(end_s / BIN_S)
        return float(self.bins[first:last].sum() / ((last - first) * BIN_S))


class Clients:
    """`streams` at all times, from `processes` processes, until `end`. start_s: time.monotonic()
    from which all times count."""

    def __init__(self, port: int, streams: int, processes: int, shape: Shape) -> None:
        context = get_context("spawn")
        self.start_s = time.monotonic()
        self._all = []
        for index in range(processes):
            ours, theirs = context.Pipe()
            share = len(range(index, streams, processes))
            numbers = index, processes
            given = port, share, numbers, shape, self.start_s, theirs
            process = context.Process(target=_run, args=given, daemon=True)
            process.start()
            theirs.close()
            self._all.append((process, ours))

    def now_s(self) -> float:
        """Seconds from the start."""
        return time.monotonic() - self.start_s

    def end(self) -> Seen:
        """Cut what runs. Raises TimeoutError for a process that does not answer."""
        for _, ours in self._all:
            ours.send(None)
        seen = Seen()
        for process, ours in self._all:
            if not ours.poll(END_S):
                raise TimeoutError(f"client process {process.pid} does not answer")
            seen.add(ours.recv())
            process.join()
        return seen


class _Call(asyncio.Protocol):
    """One request over a connection of its own. parts: what came, and when."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parts: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(exc)


def token_times(parts: Sequence[tuple[float, bytes]]) -> tuple[list[float], NDArray[np.int64]]:
    """When events with text had come in, and how many tokens each brought: text of ids."""
    found = [
        (one.end(), len(one[1].split())) for one in TEXT.finditer(b"".join(p for _, p in parts))
    ]
    found = [one for one in found if one[1]]
    ends = np.cumsum([len(part) for _, part in parts])
    places = np.searchsorted(ends, [end for end, _ in found])
    return [parts[place][0] for place in places], np.array([n for _, n in found], np.int64)


def take(seen: Seen, parts: Sequence[tuple[float, bytes]], tokens: int, start_s: float) -> str:
    """Count the tokens of an answer; why it is not whole, "" if it is."""
    times, counts = token_times(parts)
    places = ((np.array(times) - start_s) / BIN_S).astype(np.int64)
    np.add.at(seen.bins, places, counts)
    raw = parts[0][1] if parts else b""
    if b" 200 " not in raw.partition(b"\r\n")[0]:
        return f"refused: {raw[:300]!r}"
    last = b"".join(part for _, part in parts[-3:])
    if b"data: [DONE]" not in last or counts.sum() != tokens:
        return f"{counts.sum()} of {tokens} tokens, then {last[-300:]!r}"
    return ""


def _run(
    port: int,
    streams: int,
    numbers: tuple[int, int],
    shape: Shape,
    start_s: float,
    told: Connection,
) -> None:
    told.send(uvloop.run(_drive(port, streams, numbers, shape, start_s, told)))


async def _drive(
    port: int,
    streams: int,
    numbers: tuple[int, int],
    shape: Shape,
    start_s: float,
    told: Connection,
) -> Seen:
    loop, seen = asyncio.get_running_loop(), Seen()
    ending = loop.run_in_executor(None, told.recv)
    number = numbers[0]

    async def hold(delay_s: float) -> None:
        nonlocal number
        await asyncio.sleep(delay_s)
        while not ending.done():
            number += numbers[1]
            await one(number)

    async def one(number: int) -> None:
        request, tokens = shape.request(number)
        sent_s = time.monotonic()
        try:
            transport, call = await loop.create_connection(
                lambda: _Call(request), "127.0.0.1", port
            )
        except OSError as error:
            seen.faults.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(BIN_S)
            return
        await asyncio.wait({call.ended, ending}, return_when=asyncio.FIRST_COMPLETED)
        transport.close()
        fault = take(seen, call.parts, tokens, start_s)
        if not call.ended.done():
            seen.cut += 1
        elif fault:
            seen.faults.append(fault)
            await asyncio.sleep(BIN_S)
        else:
            seen.whole += 1
            times, _ = token_times(call.parts)
            longest = float(np.diff(times).max()) if len(times) > 1 else 0.0
            seen.waits.append((sent_s - start_s, times[-1] - start_s, longest))

    await asyncio.gather(*[hold(SPREAD_S * place / streams) for place in range(streams)])
    seen.cpu_s = time.process_time()
    return seen
