"""Host time of a decode step by part, with executors that compute nothing.

    python -m experiments.engines.host [--running 256] [--device-us 0] [--profile] [overrides]

Decode-only steps of `running` requests with the shipped plugins in charge and real time, medians in
microseconds from the step records; `step` is a step's wall time over a turn of 20, at whose end the
sinks are waited for. Executors:

null     launch keeps the row count, collect hands out zeros: the scheduler alone; with --device-us
         each launch takes so long after the one before, and collect sleeps until then
torch    the torch runner on the CPU over a model without layers and eight tokens: packing, upload,
         sampling, all torch calls of a step but the model's

with and without overlap, hooks called through pluggy or directly (`direct`), records written by all
sinks of the config, on the step's thread (inline) or on their own (thread, as in mode bench), or by
none. Cases take turns. overrides: of run.py. --profile: the functions in which the steps spend
most, for each executor with overlap."""

import argparse
import cProfile
import io
import json
import pstats
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf.compose import Job, default_nodes, make_job, plugin_nodes, register
from conf.instantiate import build
from conf.overrides import ROOT
from core.build import build_engine
from core.engine import Engine
from core.hooks import Hooks
from core.records import RequestRecord, StepRecord
from core.request import Request, SamplingParams
from experiments.engines.direct_hooks import DirectHooks
from experiments.engines.empty import MAX_MODEL_LEN, VOCAB, EmptyModel, NullExecutor
from experiments.engines.report import host
from plugins.executor.torch_runner import TorchRunner
from plugins.mode.outlet import Outlet
from plugins.shared.clocks import RealClock
from plugins.shared.run_info import RunInfo, SinkQuery

PROMPT_TOKENS = 200
WARM_STEPS = 50
TURN_STEPS = 20
PARTS = ("plan", "pack", "launch", "collect", "commit", "observers")


class Reached:
    """A sink behind all others: steps that these have taken."""

    steps = 0

    def step(self, record: StepRecord) -> None:  # noqa: ARG002
        """Count it."""
        self.steps += 1

    def request(self, record: RequestRecord) -> None:
        """Nothing to do."""

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Case:
    """executor: null or torch. direct: no pluggy. sinks: those of the config write all, inline or
    on a thread; "": none."""

    executor: str
    overlap: bool
    direct: bool = False
    sinks: str = ""


CASES = [
    Case("null", overlap=False),
    Case("null", overlap=True),
    Case("null", overlap=True, direct=True),
    Case("null", overlap=True, sinks="inline"),
    Case("null", overlap=True, sinks="thread"),
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
    parser.add_argument("--device-us", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    parser.add_argument("overrides", nargs="*", help="of run.py")
    arguments = parser.parse_args()
    overrides = arguments.overrides
    size = (arguments.running, arguments.steps, overrides, arguments.device_us)
    common = {"kind": "host", "running": arguments.running, "device_us": arguments.device_us}
    lines = [
        {**common, **facts(case), **times}
        for case, times in zip(CASES, decode_steps(CASES, *size), strict=True)
    ]
    sys.stdout.write(host(lines))
    if arguments.out is not None:
        with open(arguments.out, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)
    if arguments.profile:
        for case in (Case("null", overlap=True), Case("torch", overlap=True)):
            profile = cProfile.Profile()
            decode_steps([case], *size, profile=profile)
            sys.stdout.write(f"\n{case.executor}\n{hottest(profile)}")


def facts(case: Case) -> dict[str, Any]:
    """The case's fields."""
    return {name: getattr(case, name) for name in ("executor", "overlap", "direct", "sinks")}


def decode_steps(
    cases: Sequence[Case],
    running: int,
    steps: int,
    overrides: list[str],
    device_us: float = 0.0,
    profile: cProfile.Profile | None = None,
) -> list[dict[str, float]]:
    """Median microseconds a part over decode-only steps of `running` requests, for each case. Cases
    take turns, so that a busy machine slows all of them alike."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        meters = []
        for number, case in enumerate(cases):
            own = Path(folder) / str(number)
            own.mkdir()
            engine, reached = make_engine(case, running, overrides, str(own), device_us)
            stack.callback(_close, engine)
            meters.append(Meter(engine, running, reached))
        for meter in meters:
            meter.run(WARM_STEPS, keep=False)
        for begin in range(0, steps, TURN_STEPS):
            for meter in meters:
                meter.run(min(TURN_STEPS, steps - begin), keep=True, profile=profile)
        return [meter.medians() for meter in meters]


class Meter:
    """Runs an engine's steps and keeps the times of those that decode all rows. reached: behind the
    engine's sinks, if it has any."""

    def __init__(self, engine: Engine, running: int, reached: Reached | None) -> None:
        self._engine = engine
        self._running = running
        self._reached = reached
        self._events = 0
        self._times: dict[str, list[float]] = {part: [] for part in (*PARTS, "step")}

    def run(self, steps: int, keep: bool, profile: cProfile.Profile | None = None) -> None:
        """So many decode-only steps, and whatever comes before them."""
        begin, left = perf_counter(), steps
        with profile or nullcontext():
            while left:
                left -= self._step(keep)
        while self._reached is not None and self._reached.steps < self._events - 1:
            sleep(1e-4)  # the outlet holds the last step back
        if keep:
            self._times["step"].append((perf_counter() - begin) * 1e6 / steps)

    def medians(self) -> dict[str, float]:
        """Microseconds by part."""
        return {part: round(median(values), 1) for part, values in self._times.items()}

    def _step(self, keep: bool) -> bool:
        """Whether it decoded all rows."""
        event = self._engine.step()
        if event is None:
            return False
        self._events += 1
        counts = event.record.decode_tokens == self._running
        if counts and keep:
            for part in PARTS:
                self._times[part].append(event.record.host_us[part])
        return counts


def make_engine(
    case: Case, running: int, overrides: list[str], folder: str, device_us: float = 0.0
) -> tuple[Engine, Reached | None]:
    """An engine of the shipped plugins over an executor that computes nothing, `running` requests
    submitted; and what is behind its sinks."""
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
    replaced = {"fake": NullExecutor(device_us)}
    if case.executor == "torch":
        replaced = {"fake": TorchRunner(), "empty": EmptyModel()}
    hooks = Hooks(plugins | replaced, {})
    run = RunInfo(job.name, 0, job.policy, hooks.in_charge(), job.config, {})
    outlet, reached = Outlet(threaded=case.sinks == "thread"), None
    if case.sinks:
        reached = Reached()
        outlet.open([*hooks.build_all("build_sink", SinkQuery(run, folder)), reached])
    settings, rows = job.settings.engine, case.sinks != ""
    engine = build_engine(hooks, settings, 0, RealClock(), sinks=[outlet], record_rows=rows)
    if case.direct:
        engine.state.hooks = DirectHooks(hooks)  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    for index in range(running):
        prompt = rng.integers(1, VOCAB, PROMPT_TOKENS).astype(np.int32)
        params = SamplingParams(max_tokens=3800, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(index), prompt, params))
    return engine, reached


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
