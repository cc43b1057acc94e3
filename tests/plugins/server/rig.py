"""An engine on scripted tokens behind a hub in a thread, and clients in the test's asyncio loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from core.build import build_engine
from core.config import EngineConfig
from core.engine import Engine
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from plugins.mode.serve_loop import ServeLoop
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.server.channel import EngineEnd
from plugins.server.client import Ended, Facts, Token
from plugins.server.engine_client import EngineClient
from plugins.server.hub import Hub
from plugins.server.limits import Limits
from plugins.server.settings import Settings
from plugins.server.signals import StopSignals
from plugins.server.workers import Workers
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from tests.patience import SOON_S

VOCAB = 1000
FACTS = Facts("fake", VOCAB, 4096, 16384, None, "default", {}, 0, Limits())
SLOW_S = 0.05  # a step: thousands of them outlast any wait
T = TypeVar("T")


class Gate:
    """A plugin that holds the engine's thread at decide_batch while it is closed. `held`: a step
    waits at it."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self._open = threading.Event()
        self._open.set()

    @hookimpl
    def decide_batch(self, query: Any) -> None:
        if not self._open.is_set():
            self.held.set()
            assert self._open.wait(SOON_S), "nobody opened it"

    def close(self) -> None:
        self.held.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


def fake_of(step_s: float) -> Fake:
    """An executor whose `step_s` may be changed as it runs."""
    return Fake(vocab_size=VOCAB, step_s=step_s, token_s=0.0)


def real_engine(
    step_s: float = 0.001, seqs: int = 16, pages: int = 256, **plugins: object
) -> Engine:
    """An engine in real time. plugins: by name, asked before the defaults; `executor` replaces."""
    fake = plugins.pop("executor", None) or fake_of(step_s)
    defaults = {
        "order": Fcfs(),
        "admission": PromptFits(),
        "batching": Chunked(slice_tokens=256),
        "preemption": LastAdmitted(),
        "allocator": Paged(16),
        "cache": Radix(),
        "evictor": Lru(),
        "cache_admission": AdmitAll(),
        "predictor": MaxTokensShare(),
        "step_time": Fixed(),
        "executor": fake,
    }
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=256, pool_tokens=pages * 16)
    return build_engine(Hooks(defaults, plugins), config, 0, RealClock())


def ask(name: str, max_tokens: int = 4, prompt: int = 3, **fields: Any) -> Request:
    """A request; `fields` of SamplingParams or Request."""
    ids = np.frombuffer(name.encode().ljust(prompt, b"."), np.uint8)[:prompt].astype(np.int32)
    own = {key: fields.pop(key) for key in list(fields) if key in Request.__slots__}
    return Request(name, ids, SamplingParams(max_tokens=max_tokens, **fields), **own)


class Rig:
    """`engine` served from a thread; `client()` in the running loop, any number of them."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        settings: Settings | None = None,
        report_s: float = 0.02,
    ) -> None:
        self.engine = engine
        self.settings = settings or Settings(stuck_s=SOON_S)
        self.address = f"ipc://{folder}/c"
        self.signals = StopSignals(catch=False)
        self.channel = EngineEnd(self.address)
        self.hub = Hub(self.channel, Workers(), self.signals, self.settings.drain_s)
        self.loop = ServeLoop(engine, self.hub, report_s)
        self.thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None
        self.clients: list[EngineClient] = []

    async def client(self, **changes: Any) -> EngineClient:
        """Connected, and told that the engine is there."""
        settings = replace(self.settings, **changes)
        client = EngineClient(self.address, FACTS, settings, front=1 + len(self.clients))
        self.clients.append(client)
        if not self.thread.is_alive():
            self.thread.start()
        await until(lambda: client.state().reason != "the engine has not reported yet")
        return client

    def close(self) -> None:
        """Stop; raises what the thread raised."""
        if self.thread.is_alive():
            self.signals.stop()
            self.thread.join(SOON_S)
            assert not self.thread.is_alive(), "the loop did not end"
        for client in self.clients:
            client.close()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error
        finally:
            self.hub.close()


def served(
    test: Callable[[Rig], Awaitable[T]],
    folder: Path,
    engine: Engine | None = None,
    settings: Settings | None = None,
    report_s: float = 0.02,
) -> T:
    """Run an asyncio test against a rig."""

    async def work() -> T:
        rig = Rig(engine or real_engine(), folder, settings, report_s)
        try:
            return await asyncio.wait_for(test(rig), 2 * SOON_S)
        finally:
            rig.close()

    return asyncio.run(work())


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it; fails after SOON_S."""
    end = asyncio.get_running_loop().time() + SOON_S
    while not holds():
        assert asyncio.get_running_loop().time() < end, "it did not come to hold"
        await asyncio.sleep(0.002)


async def all_of(stream: Any) -> tuple[list[Token], Ended]:
    """A stream's tokens and its end."""
    tokens: list[Token] = []
    ended = None
    async for update in stream:
        assert ended is None, "nothing comes after the end"
        tokens += update.tokens
        ended = update.ended
    assert ended is not None, "a stream ends with its request's end"
    return tokens, ended
