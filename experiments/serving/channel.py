"""What the channel between engine and front end costs: latency of a first token, and CPU time of a
token event, on scripted tokens and without HTTP. Run from the clone: see README.md."""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from core.build import build_engine
from core.config import EngineConfig
from core.engine import Engine
from core.hooks import Hooks
from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.none import NoCache
from plugins.executor.fake import Fake
from plugins.mode.serve_loop import ServeLoop
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.server.channel import EngineEnd
from plugins.server.client import Facts
from plugins.server.engine_client import EngineClient
from plugins.server.hub import Hub
from plugins.server.limits import Limits
from plugins.server.settings import Settings
from plugins.server.signals import StopSignals
from plugins.server.workers import Workers
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed

PROMPT_TOKENS = 16
PAUSE_S = 0.005  # between first tokens: the engine is idle, and so are its caches
FACTS = Facts("fake", 1000, 4096, 0, None, "default", {}, 0, Limits())


def make_engine(streams: int, tokens: int, step_s: float) -> Engine:
    """Room for all streams at once."""
    pages = streams * (PROMPT_TOKENS + tokens) // 16 + 2 * streams
    defaults: dict[str, object] = {
        "order": Fcfs(),
        "admission": PromptFits(),
        "batching": Chunked(),
        "preemption": LastAdmitted(),
        "allocator": Paged(16),
        "cache": NoCache(),
        "evictor": Lru(),
        "cache_admission": AdmitAll(),
        "predictor": MaxTokensShare(),
        "step_time": Fixed(),
        "executor": Fake(vocab_size=1000, step_s=step_s, token_s=0.0, check=False),
    }
    config = EngineConfig(max_num_seqs=streams, max_num_batched_tokens=4096, pool_tokens=16 * pages)
    return build_engine(Hooks(defaults, {}), config, 0, RealClock(), record_rows=False)


def ask(name: str, tokens: int) -> Request:
    prompt = np.arange(1, PROMPT_TOKENS + 1, dtype=np.int32)
    return Request(name, prompt, SamplingParams(max_tokens=tokens))


def serve(address: str, streams: int, tokens: int, step_s: float, pipe: Connection) -> None:
    """The engine's process: until told to stop; sends its CPU seconds and steps when asked."""
    engine = make_engine(streams, tokens, step_s)
    signals = StopSignals(catch=False)
    hub = Hub(EngineEnd(address), Workers(), signals, drain_s=0.0)
    loop = ServeLoop(engine, hub, report_s=0.25)
    poll: Callable[[float], Any] = hub.poll

    def asked_first(timeout_s: float) -> Any:
        if pipe.poll():
            if pipe.recv() == "stop":
                signals.stop()
            pipe.send((time.process_time(), engine.steps))
        return poll(timeout_s)

    hub.poll = asked_first  # type: ignore[method-assign]
    loop.run()
    hub.close()


def alone(streams: int, tokens: int, step_s: float) -> float:
    """CPU microseconds of a token without any server."""
    engine = make_engine(streams, tokens, step_s)
    for number in range(streams):
        engine.submit(ask(f"r{number}", tokens))
    start_s = time.process_time()
    while engine.has_work:
        engine.step()
    return 1e6 * (time.process_time() - start_s) / (streams * tokens)


def alone_first_token_s(count: int) -> list[float]:
    """Submit to first token, in one process."""
    engine, delays = make_engine(8, 8, 0.0), []
    for number in range(count):
        time.sleep(PAUSE_S)
        start_s = time.perf_counter()
        engine.submit(ask(f"r{number}", 1))
        while (event := engine.step()) is None or not len(event.token_ids):
            pass
        delays.append(time.perf_counter() - start_s)
    return delays


async def first_token_s(client: EngineClient, count: int) -> list[float]:
    """Submit to first token, on an idle engine."""
    delays = []
    for number in range(count):
        await asyncio.sleep(PAUSE_S)
        start_s = time.perf_counter()
        stream = client.submit(ask(f"r{number}", 1))
        await anext(stream)
        delays.append(time.perf_counter() - start_s)
        async for _ in stream:
            pass
    return delays


async def read_all(client: EngineClient, streams: int, tokens: int) -> tuple[int, int]:
    """Tokens read, and updates that held several steps, over all streams."""

    async def read(number: int) -> tuple[int, int]:
        count = shared = 0
        async for update in client.submit(ask(f"s{number}", tokens)):
            count += len(update.tokens)
            shared += update.steps > 1
        return count, shared

    counts = await asyncio.gather(*(read(number) for number in range(streams)))
    return sum(count for count, _ in counts), sum(shared for _, shared in counts)


def percentiles_us(delays_s: list[float]) -> dict[str, float]:
    return {f"p{q}": 1e6 * float(np.percentile(delays_s, q)) for q in (50, 99)}


async def measure(streams: int, tokens: int, step_s: float, latency: int) -> dict[str, float]:
    """A server process and one client here: first tokens if `latency`, then all streams at once."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/channel"
        process = context.Process(target=serve, args=(address, streams, tokens, step_s, theirs))
        process.start()
        client = EngineClient(address, FACTS, Settings(max_queue=streams))
        while not client.state().ready:
            await asyncio.sleep(0.01)
        result: dict[str, float] = {}
        if latency:
            result |= percentiles_us(await first_token_s(client, latency))
        ours.send("time")
        engine_s, _ = await asyncio.to_thread(ours.recv)
        start_s, wall_s = time.process_time(), time.perf_counter()
        count, shared = await read_all(client, streams, tokens)
        client_s, wall_s = time.process_time() - start_s, time.perf_counter() - wall_s
        assert count == streams * tokens, f"lost tokens: {count} of {streams * tokens}"
        ours.send("stop")
        engine_end_s, _ = await asyncio.to_thread(ours.recv)
        result |= {
            "client_us": 1e6 * client_s / count,
            "engine_us": 1e6 * (engine_end_s - engine_s) / count,
            "tokens_per_s": count / wall_s,
            "shared": shared / count,
        }
        await client.closed.wait()
        client.close()
        process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--step-s", type=float, default=0.02, help="scripted time of a step")
    parser.add_argument("--latencies", type=int, default=500, help="first tokens to time")
    given = parser.parse_args()
    direct = percentiles_us(alone_first_token_s(given.latencies))
    through = uvloop.run(measure(8, 8, 0.0, given.latencies))
    print("first token of an idle engine, us       p50    p99")
    for name, row in (("in one process", direct), ("through the channel", through)):
        print(f"  {name:34} {row['p50']:6.0f} {row['p99']:6.0f}")
    print("CPU of a token event, us      engine alone  with server  front end  shared  tokens/s")
    for streams in (256, 1000):
        bare = alone(streams, given.tokens, given.step_s)
        row = uvloop.run(measure(streams, given.tokens, given.step_s, 0))
        print(
            f"  {streams:5} streams {bare:25.1f} {row['engine_us']:12.1f} {row['client_us']:10.1f}"
            f" {100 * row['shared']:6.1f}% {row['tokens_per_s']:9,.0f}"
        )


if __name__ == "__main__":
    main()
