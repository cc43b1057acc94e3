"""Do tokens depend on the schedule, and what does it cost that they do not?

    python -m experiments.deterministic.run --out deterministic.jsonl               # on a GPU
    python -m experiments.deterministic.run --model tiny_llama --device cpu \\
        --requests 12 --prompt 3,60 --output 8 --running 4,8 --rounds 1             # on a CPU

Tokens: the same requests, half greedy and half drawn, under ten schedules with and without a prefix
cache, in a pool too small for them and with preemptions forced besides; every run is compared with
the first, which has room and no preemption. Speed: requests of one length, all running at once;
modes take turns. Both in the mode that config calls default and with engine.deterministic=true, on
one set of random weights. Arguments such as `key=value` go to run.py's config."""

import argparse
import gc
import json
import random
import sys
import tempfile
from collections.abc import Iterator
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
from conf.device import resolve_device
from conf.instantiate import build
from conf.overrides import ROOT
from core.build import build_engine
from core.engine import Engine
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.queries import ModelQuery
from core.request import Request, SamplingParams
from plugins.model.decoder import Decoder
from plugins.shared.clocks import RealClock

SCHEDULES: dict[str, tuple[str, ...]] = {
    "fcfs, chunked": (),
    "small chunks": ("batching.slice_tokens=48",),
    "prefill first": ("batching=prefill_first",),
    "priority": ("+policy=priority",),
    "evict_shortest": ("+policy=evict_shortest",),
    "random": ("+policy=random",),
    "preempt_priority": ("+policy=[priority,preempt_priority]",),
    "reserve_max": ("+policy=reserve_max",),
    "defer_twins": ("+policy=defer_twins",),
    "page of 1": ("allocator.page_size=1", "batching=prefill_first", "+policy=evict_shortest"),
}
CACHES = ("none", "radix")
MODES = {"default": "false", "deterministic": "true"}
FORCED_EVERY = 5
FORCED_TIMES = 24

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Hands a loaded model to the engine."""

    model: Decoder

    @hookimpl
    def build_model(self, query: ModelQuery) -> Decoder:  # noqa: ARG002
        """It."""
        return self.model


@dataclass(slots=True)
class Experiment:
    """Arguments, overrides for all runs, and the model by mode: the same weights."""

    arguments: argparse.Namespace
    overrides: list[str]
    device: str
    models: dict[str, Decoder]

    def engine(self, mode: str, *overrides: str) -> Engine:
        """An engine of a mode."""
        job = composed([*self.overrides, f"engine.deterministic={MODES[mode]}", *overrides])
        behind, first = (
            {name: build(path, node) for name, (path, node) in nodes.items()}
            for nodes in (default_nodes(job), plugin_nodes(job))
        )
        for name, plugin in behind.items():
            if hasattr(plugin, "build_model"):
                behind[name] = Loaded(self.models[mode])
        seed, config = job.settings.seed, job.settings.engine
        return build_engine(Hooks(behind, first), config, seed, RealClock(), self.device)


def main() -> int:
    """Run what the arguments ask for; 1 if tokens differed in deterministic mode."""
    arguments, overrides = _parser().parse_known_args()
    register()
    with initialize_config_dir(str(ROOT), version_base="1.3"):
        experiment = _experiment(arguments, overrides)
        lines: list[Line] = []
        for part, compute in (("tokens", tokens), ("speed", speed)):
            for line in compute(experiment) if part not in arguments.without else ():
                facts = {"part": part, "model": arguments.model, "device": _name(experiment.device)}
                lines.append(facts | line)
                sys.stdout.write(json.dumps(lines[-1]) + "\n")
                sys.stdout.flush()
    if arguments.out is not None:
        with open(arguments.out, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)
    sys.stdout.write(_report(lines))
    wrong = [one for one in lines if one.get("mode") == "deterministic" and one.get("differ")]
    return 1 if wrong else 0


def tokens(experiment: Experiment) -> Iterator[Line]:
    """For each mode, schedule and cache: how many tokens and requests differ from the first run."""
    requests = _mixed(experiment.arguments)
    total = sum(len(one.prompt) + one.params.max_tokens for one in requests)
    pool = max(total * 2 // 5, max(len(one.prompt) + one.params.max_tokens for one in requests))
    room, scarce = (f"engine.pool_tokens={-(-size // 16) * 16}" for size in (2 * total, pool))
    seqs = f"engine.max_num_seqs={len(requests)}"
    for mode in MODES:
        engine = experiment.engine(mode, "cache=none", room, seqs)
        first = _serve(engine, requests)
        _free(engine)
        for name, overrides in SCHEDULES.items():
            for cache in CACHES:
                engine = experiment.engine(mode, f"cache={cache}", scarce, seqs, *overrides)
                found = _serve(engine, requests, forced=True)
                pairs = [(found[key], first[key]) for key in first]
                yield {
                    "mode": mode,
                    "schedule": name,
                    "cache": cache,
                    "tokens": sum(map(len, first.values())),
                    "differ": sum(a != b for pair in pairs for a, b in zip(*pair, strict=True)),
                    "requests_differ": sum(a != b for a, b in pairs),
                    "preemptions": sum(one.preemptions for one in engine.records.values()),
                }
                _free(engine)


def speed(experiment: Experiment) -> Iterator[Line]:
    """For each mode and number running: seconds in all, milliseconds of a step that decodes."""
    arguments = experiment.arguments
    most = max(arguments.running)
    length = arguments.prompt[1] + arguments.speed_output
    settings = [f"engine.max_num_seqs={most}", f"engine.pool_tokens={most * (length + 16)}"]
    settings += ["cache=none", "engine.overlap=true", f"batching.slice_tokens={arguments.budget}"]
    engines = {mode: experiment.engine(mode, *settings) for mode in MODES}
    for mode, engine in engines.items():  # what is compiled by need is there afterwards
        for count in arguments.running:
            _timed(engine, arguments, count, f"warm-{mode}")
    for number in range(arguments.rounds):
        for count in arguments.running:
            for mode, engine in engines.items():
                wall_s, step_s = _timed(engine, arguments, count, str(number))
                yield {
                    "mode": mode,
                    "round": number,
                    "running": count,
                    "wall_s": round(wall_s, 4),
                    "step_ms": round(1000 * step_s, 4),
                }
    for engine in engines.values():
        _free(engine)


def composed(overrides: list[str]) -> Job:
    """The job of a command line."""
    config = compose("config", overrides, return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return make_job(task, choices, {}, Path(tempfile.gettempdir()))


def _experiment(arguments: argparse.Namespace, overrides: list[str]) -> Experiment:
    budget = f"engine.max_num_batched_tokens={arguments.budget}"
    common = [f"model={arguments.model}", f"device={arguments.device}", "progress=false", budget]
    common += ["sinks=null", *overrides]
    jobs = {
        mode: composed([*common, f"engine.deterministic={value}"]) for mode, value in MODES.items()
    }
    device = resolve_device(arguments.device)
    plain = build("model", jobs["default"].config["model"])
    model = plain.build_model(ModelQuery(device, 0, False))
    ops = build("ops.layers", jobs["deterministic"].config["ops"]["layers"])
    ops.check(model.device, model.dtype, model.head_dim)
    exact = Decoder(model.spec, model.weights, model.facts, ops)
    return Experiment(arguments, common, device, {"default": model, "deterministic": exact})


def _mixed(arguments: argparse.Namespace) -> list[Request]:
    """Requests of mixed lengths, of which every fourth begins with another's prompt."""
    rng = random.Random(0)
    made: list[Request] = []
    for number in range(arguments.requests):
        prompt = [rng.randint(8, 100) for _ in range(rng.randint(*arguments.prompt))]
        if number % 4 == 3:
            prompt = [*made[-1].prompt.tolist()[: arguments.prompt[1] // 2], *prompt[:9]]
        params = SamplingParams(
            max_tokens=arguments.output,
            temperature=(0.0, 1.0)[number % 2],
            top_k=(0, 20)[number // 2 % 2],
            seed=number,
            ignore_eos=True,
        )
        ids = np.array(prompt, np.int32)
        made.append(Request(str(number), ids, params, priority=rng.randint(0, 3)))
    return made


def _serve(engine: Engine, requests: list[Request], forced: bool = False) -> dict[str, list[int]]:
    """Token ids by request. forced: every few steps a running sequence is preempted without
    need."""
    for request in requests:
        engine.submit(request)
    step = 0
    while engine.has_work:
        state = engine.state
        due = step % FORCED_EVERY == FORCED_EVERY - 1 and step < FORCED_EVERY * FORCED_TIMES
        if forced and due and len(state.running):
            victim = int(state.running[step // FORCED_EVERY * 7 % len(state.running)])
            state.preempt(state.table.at(victim))
        engine.step()
        step += 1
    return {name: list(one.choices[0].token_ids) for name, one in engine.records.items()}


def _timed(
    engine: Engine, arguments: argparse.Namespace, count: int, label: str
) -> tuple[float, float]:
    """Seconds for `count` requests in all, and median seconds of a step in which all decode."""
    rng = random.Random(1)
    for number in range(count):
        ids = np.array([rng.randint(8, 100) for _ in range(arguments.prompt[1])], np.int32)
        params = SamplingParams(max_tokens=arguments.speed_output, temperature=0.0, ignore_eos=True)
        engine.submit(Request(f"{label}-{count}-{number}", ids, params))
    begin = before = perf_counter()
    steps = []
    while engine.has_work:
        event = engine.step()
        now = perf_counter()
        if event is not None and len(event.token_ids) == count:
            steps.append(now - before)
        before = now
    engine.records.clear()
    return before - begin, median(steps[1:-1])


def _free(engine: Engine) -> None:
    engine.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _report(lines: list[Line]) -> str:
    rows = []
    for mode in MODES:
        runs = [one for one in lines if one["part"] == "tokens" and one["mode"] == mode]
        if runs:
            rows.append(
                f"{mode}: {sum(one['differ'] for one in runs)} of"
                f" {sum(one['tokens'] for one in runs)} tokens differ in {len(runs)} runs,"
                f" {sum(one['preemptions'] for one in runs)} preemptions"
            )
    timed = [one for one in lines if one["part"] == "speed"]
    for count in sorted({one["running"] for one in timed}):
        of = {
            (mode, key): median(
                one[key] for one in timed if one["mode"] == mode and one["running"] == count
            )
            for mode in MODES
            for key in ("step_ms", "wall_s")
        }
        rows += [
            f"{count} running, {key}: {of['default', key]} -> {of['deterministic', key]},"
            f" {100 * (of['deterministic', key] / of['default', key] - 1):+.1f} %"
            for key in ("step_ms", "wall_s")
        ]
    return "".join(row + "\n" for row in rows)


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_0_6b", help="a file of conf/model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=64, help="whose tokens are compared")
    parser.add_argument("--prompt", type=_numbers, default=[20, 512], help="least,most tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens of a compared request")
    parser.add_argument("--running", type=_numbers, default=[64, 256], help="requests timed")
    parser.add_argument("--speed-output", type=int, default=192, help="tokens of a timed request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--without", nargs="*", default=[], choices=("tokens", "speed"))
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
