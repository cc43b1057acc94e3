"""Host time of a decode step by part, with executors that compute nothing.

    python -m experiments.engines.host [--running 256] [--profile] [overrides of run.py]

Decode-only steps of `running` requests with the shipped plugins in charge and real time, medians in
microseconds from the step records; `step` is the whole call of Engine.step. Executors:

null     launch keeps the row count, collect hands out zeros: the scheduler alone
torch    the torch runner on the CPU over a model without layers and eight tokens: packing, upload,
         sampling, all torch calls of a step but the model's

with and without overlap, hooks called through pluggy or directly (`direct`), records written by all
sinks of the config or by none. Cases take turns. --profile: the functions in which the steps spend
most, for each executor with overlap."""

import argparse
import cProfile
import io
import json
import pstats
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf.compose import Job, default_nodes, make_job, plugin_nodes, register
from conf.instantiate import build
from conf.overrides import ROOT
from core.build import build_engine
from core.clock import RealClock
from core.engine import Engine
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.launch import Launch, LaunchResult, PoolLayout
from core.queries import AttentionQuery, ExecutorQuery, ModelQuery, SinkQuery
from core.records import RunInfo
from core.request import Request, SamplingParams
from experiments.engines.direct_hooks import DirectHooks
from experiments.engines.report import host
from plugins.executor.torch_runner import TorchRunner

PROMPT_TOKENS = 200
MAX_MODEL_LEN = 4096
WARM_STEPS = 50
TURN_STEPS = 20
PARTS = ("plan", "pack", "launch", "collect", "commit", "observers")
VOCAB = 8


class NullExecutor:
    """core.protocols.Executor: every token is 0."""

    vocab_size, max_model_len, end_token_ids, tokenizer = VOCAB, MAX_MODEL_LEN, (), None

    def __init__(self) -> None:
        self._sizes: deque[tuple[int, int]] = deque()

    @hookimpl
    def build_executor(self, query: ExecutorQuery) -> "NullExecutor":  # noqa: ARG002
        """Itself."""
        return self

    def prepare(self, layout: PoolLayout) -> None:
        """Nothing to allocate."""

    def launch(self, launch: Launch) -> None:
        """Remember how many tokens it yields."""
        self._sizes.append((launch.launch_id, int(launch.samples.sum())))

    def collect(self) -> LaunchResult:
        """Zeros."""
        launch_id, size = self._sizes.popleft()
        return LaunchResult(launch_id, np.zeros(size, np.int32), 0.0)

    def describe(self) -> dict[str, Any]:
        """Its name."""
        return {"executor": "null"}

    def close(self) -> None:
        """Nothing to release."""


class EmptyModel:
    """core.model_protocols.Model and AttentionBackend without a layer: logits are zeros."""

    name, num_layers, num_q_heads, num_kv_heads, head_dim = "empty", 1, 1, 1, 1
    vocab_size, max_model_len, end_token_ids, tokenizer = VOCAB, MAX_MODEL_LEN, (), None
    dtype, device = torch.float32, torch.device("cpu")

    @hookimpl
    def build_model(self, query: ModelQuery) -> "EmptyModel":  # noqa: ARG002
        """Itself."""
        return self

    @hookimpl
    def build_attention(self, query: AttentionQuery) -> "EmptyModel":  # noqa: ARG002
        """Itself."""
        return self

    def plan(self, batch: Any) -> None:
        """No metadata."""

    def describe(self) -> dict[str, Any]:
        """Its name."""
        return {"attention": "empty"}

    def forward(
        self,
        token_ids: Any,  # noqa: ARG002
        positions: Any,  # noqa: ARG002
        attend: Any,  # noqa: ARG002
        logits_rows: Any,
    ) -> Any:
        """Logits float32 [k, VOCAB]."""
        return torch.zeros(len(logits_rows), VOCAB)


@dataclass(frozen=True, slots=True)
class Case:
    """executor: null or torch. direct: no pluggy. sinks: those of the config write all."""

    executor: str
    overlap: bool
    direct: bool = False
    sinks: bool = False


CASES = [
    Case("null", overlap=False),
    Case("null", overlap=True),
    Case("null", overlap=True, direct=True),
    Case("null", overlap=True, sinks=True),
    Case("torch", overlap=False),
    Case("torch", overlap=True),
]


def main() -> None:
    """Print the table, and profiles on demand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    parser.add_argument("overrides", nargs="*", help="of run.py")
    arguments = parser.parse_args()
    overrides = arguments.overrides
    size = (arguments.running, arguments.steps, overrides)
    lines = [
        {"kind": "host", "running": arguments.running, **facts(case), **times}
        for case, times in zip(CASES, decode_steps(CASES, *size), strict=True)
    ]
    sys.stdout.write(host(lines))
    if arguments.out is not None:
        with open(arguments.out, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)
    if arguments.profile:
        for case in (Case("null", overlap=True), Case("torch", overlap=True)):
            profile = cProfile.Profile()
            decode_steps([case], *size, profile)
            sys.stdout.write(f"\n{case.executor}\n{hottest(profile)}")


def facts(case: Case) -> dict[str, Any]:
    """The case's fields."""
    return {name: getattr(case, name) for name in ("executor", "overlap", "direct", "sinks")}


def decode_steps(
    cases: Sequence[Case],
    running: int,
    steps: int,
    overrides: list[str],
    profile: cProfile.Profile | None = None,
) -> list[dict[str, float]]:
    """Median microseconds a part over decode-only steps of `running` requests, for each case. Cases
    take turns, so that a busy machine slows all of them alike."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        meters = []
        for number, case in enumerate(cases):
            own = Path(folder) / str(number)
            own.mkdir()
            engine = make_engine(case, running, overrides, str(own))
            stack.callback(_close, engine)
            meters.append(Meter(engine, running))
        for meter in meters:
            meter.run(WARM_STEPS, keep=False)
        for begin in range(0, steps, TURN_STEPS):
            for meter in meters:
                meter.run(min(TURN_STEPS, steps - begin), keep=True, profile=profile)
        return [meter.medians() for meter in meters]


class Meter:
    """Runs an engine's steps and keeps the times of those that decode all rows."""

    def __init__(self, engine: Engine, running: int) -> None:
        self._engine = engine
        self._running = running
        self._times: dict[str, list[float]] = {part: [] for part in (*PARTS, "step")}

    def run(self, steps: int, keep: bool, profile: cProfile.Profile | None = None) -> None:
        """So many decode-only steps, and whatever comes before them."""
        while steps:
            if profile is not None:
                profile.enable()
            begin = perf_counter()
            event = self._engine.step()
            step_us = (perf_counter() - begin) * 1e6
            if profile is not None:
                profile.disable()
            if event is None or event.record.decode_tokens != self._running:
                continue
            steps -= 1
            if keep:
                self._times["step"].append(step_us)
                for part in PARTS:
                    self._times[part].append(event.record.host_us[part])

    def medians(self) -> dict[str, float]:
        """Microseconds by part."""
        return {part: round(median(values), 1) for part, values in self._times.items()}


def make_engine(case: Case, running: int, overrides: list[str], folder: str) -> Engine:
    """An engine of the shipped plugins over an executor that computes nothing, `running` requests
    submitted."""
    job = _job(
        [
            "executor=fake",
            f"engine.max_num_seqs={running}",
            "engine.max_num_batched_tokens=8192",
            f"engine.pool_tokens={running * MAX_MODEL_LEN}",
            f"engine.overlap={str(case.overlap).lower()}",
            "progress=false",
            *overrides,
        ]
    )
    plugins: dict[str, object] = {}
    for nodes in (default_nodes(job), plugin_nodes(job)):
        plugins |= {name: build(path, node) for name, (path, node) in nodes.items()}
    replaced = {"fake": NullExecutor()}
    if case.executor == "torch":
        replaced = {"fake": TorchRunner(), "empty": EmptyModel()}
    hooks = Hooks(plugins | replaced, {})
    run = RunInfo(job.name, 0, job.policy, hooks.in_charge(), job.config, {})
    sinks = hooks.build_all("build_sink", SinkQuery(run, folder)) if case.sinks else []
    settings = job.settings.engine
    engine = build_engine(hooks, settings, 0, RealClock(), sinks=sinks, record_rows=case.sinks)
    if case.direct:
        engine.state.hooks = DirectHooks(hooks)  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    for index in range(running):
        prompt = rng.integers(1, VOCAB, PROMPT_TOKENS).astype(np.int32)
        params = SamplingParams(max_tokens=3800, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(index), prompt, params))
    return engine


def hottest(profile: cProfile.Profile, count: int = 30) -> str:
    """Functions by their own time."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(count)
    return text.getvalue()


def _close(engine: Engine) -> None:
    for sink in engine.sinks:
        if hasattr(sink, "fail"):
            sink.fail(RuntimeError("not a whole run"))
    engine.close()


def _job(overrides: list[str]) -> Job:
    register()
    with initialize_config_dir(str(ROOT), version_base="1.3"):
        config = compose("config", overrides, return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return make_job(task, choices, {}, Path(tempfile.gettempdir()))


if __name__ == "__main__":
    main()
