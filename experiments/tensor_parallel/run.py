"""What does a second GPU give a decode step?

    python -m experiments.tensor_parallel.run --out tensor_parallel.jsonl          # two GPUs
    python -m experiments.tensor_parallel.run --model tiny_llama --device cpu --running 4 \\
        --prompt 20 --output 12 --budget 64 --rounds 1                             # on a CPU

Requests of one length, all running at once, on one device and on two, one after the other: a model
of 32 billion weights in half precision fits one GPU beside its KV, and not twice. Arguments such as
`key=value` go to run.py's config."""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
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
from core.request import Request, SamplingParams
from plugins.shared.clocks import RealClock

Line = dict[str, Any]
EDGE = 8  # steps of the end left out: requests leave


def main() -> int:
    """Measure what the arguments ask for."""
    arguments, overrides = _parser().parse_known_args()
    register()
    lines = []
    with initialize_config_dir(str(ROOT), version_base="1.3"):
        for size in arguments.sizes:
            for line in measured(arguments, overrides, size):
                lines.append(line)
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    if arguments.out is not None:
        with open(arguments.out, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)
    sys.stdout.write(report(lines))
    return 0


def measured(arguments: argparse.Namespace, overrides: list[str], size: int) -> Iterator[Line]:
    """For each number running and each round: milliseconds of a step that decodes, seconds until
    all had their first token, and in all. The first round of each warms up."""
    begin = perf_counter()
    engine = made(arguments, overrides, size)
    facts = engine.executor.describe()
    common = {
        "model": arguments.model,
        "device": str(facts["device_name"]),
        "tensor_parallel": size,
        "start_s": round(perf_counter() - begin, 2),
        "pool_tokens": engine.state.memory.ledger.num_pages * engine.state.memory.page_size,
        "graphs": bool(facts["graphs"]["sizes"]),
    }
    for number in range(arguments.rounds + 1):
        for count in arguments.running:
            line = timed(engine, arguments, count, f"{number}-{count}")
            if number:
                yield common | {"round": number, "running": count} | line
    engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def made(arguments: argparse.Namespace, overrides: list[str], size: int) -> Engine:
    """An engine over `size` devices, with room for all that run."""
    given = [f"model={arguments.model}", f"device={arguments.device}", "progress=false"]
    given += [f"engine.max_num_batched_tokens={arguments.budget}", "engine.pool_tokens=auto"]
    given += [f"engine.max_num_seqs={max(arguments.running)}", "engine.overlap=true"]
    given += [f"engine.max_model_len={arguments.prompt + arguments.output}", "cache=none"]
    given += [f"batching.slice_tokens={arguments.budget}", "sinks=null"]
    job = _composed([*given, f"executor.tensor_parallel={size}", *overrides])
    plugins = (
        {name: build(path, node) for name, (path, node) in nodes.items()}
        for nodes in (default_nodes(job), plugin_nodes(job))
    )
    device = resolve_device(arguments.device)
    return build_engine(
        Hooks(*plugins), job.settings.engine, job.settings.seed, RealClock(), device
    )


def timed(engine: Engine, arguments: argparse.Namespace, count: int, label: str) -> Line:
    """`count` requests, all submitted at once."""
    random = np.random.default_rng(1)
    for number in range(count):
        ids = random.integers(8, 100, arguments.prompt).astype(np.int32)
        params = SamplingParams(max_tokens=arguments.output, temperature=0.0, ignore_eos=True)
        engine.submit(Request(f"{label}-{number}", ids, params))
    begin = before = perf_counter()
    steps: list[float] = []
    first_s = 0.0
    while engine.has_work:
        event = engine.step()
        now = perf_counter()
        if event is not None and len(event.token_ids) == count:
            first_s = first_s or now - begin
            steps.append(now - before)
        before = now
    engine.records.clear()
    return {
        "step_ms": round(1000 * median(steps[1:-EDGE] or steps), 4),
        "first_s": round(first_s, 4),
        "wall_s": round(before - begin, 4),
    }


def report(lines: list[Line]) -> str:
    """Medians of the rounds, and those of one device over those of several."""
    found: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        found.setdefault((line["running"], line["tensor_parallel"]), []).append(line)
    rows = ["| running | devices | step, ms | first tokens, s | all, s | pool, tokens | speed-up |"]
    rows.append("|---" * 7 + "|")
    for (running, size), same in sorted(found.items()):
        step, first, wall = (
            median(one[name] for one in same) for name in ("step_ms", "first_s", "wall_s")
        )
        alone = found.get((running, 1))
        gain = "" if alone is None else f"{median(one['step_ms'] for one in alone) / step:.2f}"
        rows.append(
            f"| {running} | {size} | {step:.3f} | {first:.3f} | {wall:.3f}"
            f" | {same[0]['pool_tokens']:,} | {gain} |"
        )
    return "".join(row + "\n" for row in rows)


def _composed(overrides: list[str]) -> Job:
    config = compose("config", overrides, return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return make_job(task, choices, {}, Path(tempfile.gettempdir()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen2_5_32b", help="a file of conf/model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sizes", type=_numbers, default=[1, 2], help="devices")
    parser.add_argument("--running", type=_numbers, default=[1, 64], help="requests at once")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
