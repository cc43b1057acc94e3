"""An engine with nothing to do notices that its executor is lost, and says so."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from core.build import build_engine
from core.clock import Clock
from core.errors import LaunchError
from core.hookspecs import hookimpl
from core.request import Request, SamplingParams
from plugins.executor.fake import Fake
from plugins.executor.torch_runner import TorchRunner
from plugins.mode.bench import CHECK_S, Bench
from plugins.mode.serve_loop import ServeLoop
from plugins.model.loader import HuggingFaceModel
from plugins.server.app import make_app
from plugins.server.client import Unavailable
from plugins.shared.clocks import RealClock, VirtualClock
from tests.plugins.executor.rank_threads import hooks, settings
from tests.plugins.mode.mode_session import VOCAB, Given, make_session
from tests.plugins.server.rig import Rig, ask, real_engine, served, until

LLAMA = Path(__file__).resolve().parents[3] / "conf" / "model" / "tiny_llama.yaml"


class Lost:
    """An executor's plugin: scripted, and lost from `lost_s` of the engine's clock on."""

    def __init__(self, lost_s: float) -> None:
        self.fake = Fake(vocab_size=VOCAB, step_s=0.001, token_s=0.0)
        self.lost_s = lost_s
        self.clock: Clock | None = None

    @hookimpl
    def build_executor(self, query: Any) -> Any:
        self.clock = query.clock
        executor = self.fake.build_executor(query)
        executor.check = self.check
        return executor

    def check(self) -> None:
        assert self.clock is not None, "it was built"
        if self.clock.now() >= self.lost_s:
            raise LaunchError("rank 1 is lost")


def test_ready_turns_red_when_a_rank_of_an_idle_server_is_killed(tmp_path: Path) -> None:
    config = yaml.safe_load(LLAMA.read_text())["config"]
    model = HuggingFaceModel(load="dummy", config=config, tensor_parallel=2)
    runner = TorchRunner(tensor_parallel=2)
    engine = build_engine(hooks(model, runner), settings(), 0, RealClock(), contains_faults=True)
    rank = engine.executor._ranks._processes[0].pid
    said = f"tensor-parallel rank 1 (process {rank}) was killed by SIGKILL"

    async def test(rig: Rig) -> None:
        client = await rig.client()
        app = httpx.ASGITransport(make_app(client, rig.settings))
        async with httpx.AsyncClient(transport=app, base_url="http://tritium") as http:
            assert (await http.get("/ready")).status_code == 200
            os.kill(rank, signal.SIGKILL)
            await until(lambda: not client.state().ready)
            ready = await http.get("/ready")
        assert ready.status_code == 503
        assert said in ready.json()["reason"]
        with pytest.raises(Unavailable, match="was killed by SIGKILL"):
            await client.submit(ask("late"))

    try:
        served(test, tmp_path, engine)
    finally:
        engine.close()


def test_replica_whose_executor_is_lost_ends_for_another() -> None:
    class Idle:
        draining = False
        polls = 0

        def poll(self, timeout_s: float) -> list[Request]:
            self.polls += 1
            self.draining = self.polls == 100  # at last
            time.sleep(timeout_s)
            return []

        def report(self, state: dict[str, Any]) -> None:
            assert state["ready"]

    engine = real_engine(executor=Lost(0.0))
    with pytest.raises(LaunchError, match="rank 1 is lost"):
        ServeLoop(engine, Idle(), report_s=0.001, faults_end=True).run()  # type: ignore[arg-type]


def test_bench_that_waits_for_an_arrival_ends(tmp_path: Path) -> None:
    prompt, params = np.arange(1, 9, dtype=np.int32), SamplingParams(max_tokens=4)
    requests = [Request("a", prompt, params), Request("b", prompt, params, arrival_s=1000.0)]
    clock = VirtualClock()
    session = make_session(tmp_path, Given(requests), clock, executor=Lost(100.0))
    with pytest.raises(LaunchError, match="rank 1 is lost"):
        Bench().run(session)
    assert 100.0 <= clock.now() < 100.0 + CHECK_S


def test_bench_comes_no_later_for_looking(tmp_path: Path) -> None:
    prompt, params = np.arange(1, 9, dtype=np.int32), SamplingParams(max_tokens=4)
    arrivals = [0.0, 2.5, 60.0]
    requests = [Request(str(at), prompt, params, arrival_s=at) for at in arrivals]
    session = make_session(tmp_path, Given(requests), VirtualClock(), executor=Lost(1000.0))
    summary = Bench().run(session)
    assert summary["requests"]["completed"] == 3
    assert summary["latency"]["queue_s"]["max"] == 0.0
