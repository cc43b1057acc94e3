"""Attention kernels beside torch's and, where they are installed, others', on one card in one run.

    python -m experiments.kernels.bench [--peers FILE] [--rounds 5] [--out FILE]
                                        [--tables decode,prefill,graph,planner]
                                        [--only NAMES] [--without NAMES]

--peers: a Python file with a dict IMPL of name -> function(inputs, new, context, page_size) ->
(call, out), as FA3, FlashInfer and vLLM's Triton kernel are wrapped for these tables. Of decode and
prefill, every implementation is checked against float32 on the case's own inputs before it is
timed; rounds interleave them. What compiles does so beforehand, in several processes.

decode, prefill: triton.testing.do_bench, median, L2 cleared, launches included; plans made
beforehand on all sides. graph: 32 calls on 32 distinct caches in one captured graph, divided by 32;
ours with the step's planner, others with plans made beforehand. planner: ours alone, of 32 plans in
a graph. One JSON line a figure goes to --out, of which experiments/kernels/report.py makes tables
and a figure."""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO

import torch
import triton
from triton.testing import do_bench

from experiments.kernels.cases import (
    DECODE,
    GRAPH,
    KV_HEADS,
    PREFILL,
    Case,
    Inputs,
    capture,
    graph_us,
    make,
    replay_us,
)
from experiments.kernels.implementations import (
    COMPILED,
    CONTIGUOUS,
    FLEX,
    OURS,
    Build,
    Call,
    implementations,
    our_layers,
)
from experiments.kernels.roofline import Ceilings, ratios
from kernels.split_plan import Contexts, PlannerConfig, PlanShape, balanced

LAYERS = 32
RIVALS = ("fa3", "flashinfer")
TOLERANCE = 1e-2  # relative 2-norm error of a bfloat16 result
FLEX_CASES = ("1x32k", "32x4k", "64x8k", "256x1k", "2k + 0", "8k + 0", "4 x 8k", "2k + 6k")
"""A compilation each: enough of them."""
PLANNED_ROWS = (1, 64, 256, 1024)
PLANNERS = {"default": None} | {
    f"{rows}x{warps}": PlannerConfig(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8)
}
COMPILE_S = 150.0


@dataclass
class Result:
    """Microseconds of one implementation in each round, or why there are none."""

    case: Case
    name: str
    rounds_us: list[float] = field(default_factory=list)
    error: float | None = None
    failure: str | None = None

    @property
    def us(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds_us)

    def line(self, kind: str, ceilings: Ceilings) -> dict[str, Any]:
        """For the log."""
        facts: dict[str, Any] = {"kind": kind, "case": self.case.name, "name": self.name}
        if self.failure is not None:
            return facts | {"failure": self.failure}
        facts |= {"us": round(self.us, 2), "rounds_us": [round(t, 2) for t in self.rounds_us]}
        facts |= ceilings.facts(self.case, self.us)
        return facts if self.error is None else facts | {"rel_error": self.error}


def main() -> None:
    """Run the tables that the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench.jsonl"))
    parser.add_argument("--tables", default="decode,prefill,graph,planner")
    parser.add_argument("--only", type=_names, default=[])
    parser.add_argument("--without", type=_names, default=[])
    parser.add_argument("--processes", type=int, default=12, help="that compile; 0 = none")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: the kernels are timed on it")
    builds = implementations(arguments.peers, arguments.only, arguments.without)
    tables, rounds, begin = arguments.tables.split(","), arguments.rounds, time.monotonic()
    eager = {kind: cases for kind, cases in EAGER.items() if kind in tables}
    if arguments.processes and eager:
        names = [name for name in builds if name in COMPILED]
        _compile([c for cases in eager.values() for c in cases], arguments, names)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    with arguments.out.open("w") as log:
        ceilings = _ceilings(log)
        for kind, cases in eager.items():
            print(f"\n{kind}: microseconds, median of {rounds} rounds", flush=True)
            for case in cases:
                _report(log, kind, _eager(case, builds, rounds), ceilings)
        if "planner" in tables:
            _planners(log)
        if "graph" in tables:  # last: a call that cannot be captured may cost the process
            print("\ngraph: microseconds a layer", flush=True)
            for case in GRAPH:
                _report(log, "graph", _in_graph(case, builds, rounds), ceilings)
    print(f"{time.monotonic() - begin:.0f} s in all")


EAGER: Mapping[str, tuple[Case, ...]] = {"decode": DECODE, "prefill": PREFILL}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _compile(cases: list[Case], arguments: argparse.Namespace, names: list[str]) -> None:
    """Fill the compilers' caches. What fails here fails again, and is reported, where it counts."""
    pool = ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn"))
    tasks = [pool.submit(_run_once, case, arguments.peers, names) for case in cases]
    deadline = time.monotonic() + COMPILE_S
    for case, task in zip(cases, tasks, strict=True):
        try:
            task.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # a time-out too
            print(f"{case.name}: not compiled beforehand: {type(error).__name__} {error}")
    for process in list(pool._processes.values()) if time.monotonic() > deadline else []:
        process.kill()
    pool.shutdown(cancel_futures=True)


def _run_once(case: Case, peers: Path | None, names: list[str]) -> None:
    if not names:
        return
    inputs = make(case)
    for name, build in implementations(peers, names).items():
        try:
            if not _left_out(case, name):
                build(inputs, 0)()
        except Exception as error:
            print(f"{case.name}: {name} does not run: {str(error)[:100]}", flush=True)
    torch.cuda.synchronize()
    del inputs
    torch.cuda.empty_cache()


def _left_out(case: Case, name: str) -> bool:
    return name == FLEX and case.name not in FLEX_CASES


def _eager(case: Case, builds: Mapping[str, Build], rounds: int) -> list[Result]:
    inputs = make(case)
    results, calls = _checked(inputs, builds)
    for _ in range(rounds):
        for result, call in calls:
            ms = do_bench(call, warmup=8, rep=40, return_mode="median")
            result.rounds_us.append(ms * 1e3)
    del inputs, calls
    torch.cuda.empty_cache()
    return results


def _checked(
    inputs: Inputs, builds: Mapping[str, Build]
) -> tuple[list[Result], list[tuple[Result, Call]]]:
    """A result each, and the calls of those that are right."""
    results, calls = [], []
    case = inputs.case
    sample = sorted({0, min(1, len(case.new) - 1), len(case.new) // 2, len(case.new) - 1})
    for name, build in builds.items():
        if _left_out(case, name):
            continue
        result = Result(case, name)
        results.append(result)
        try:
            call = build(inputs, 0)
            result.error = inputs.error(call(), sample)
            if not result.error < TOLERANCE:
                raise ValueError(f"relative error {result.error:.3g}")
            calls.append((result, call))
        except Exception as error:  # one kernel must not cost the others
            result.failure = f"{type(error).__name__}: {str(error)[:200]}"
    return results, calls


def _in_graph(case: Case, builds: Mapping[str, Build], rounds: int) -> list[Result]:
    inputs = make(case, LAYERS)
    graphs: list[tuple[Result, Any, Any]] = []
    results = []
    for name, build in builds.items():
        if name in CONTIGUOUS:
            continue
        result = Result(case, name)
        results.append(result)
        try:
            run = our_layers(inputs) if name == OURS else _all_layers(build, inputs)
            graphs.append((result, capture(run), run))  # run owns what its kernels work in
        except Exception as error:
            result.failure = f"{type(error).__name__}: {str(error)[:200]}"
    for _ in range(rounds):
        for result, graph, _ in graphs:
            result.rounds_us.append(replay_us(graph, repeats=5) / LAYERS)
    del inputs, graphs
    torch.cuda.empty_cache()
    return results


def _all_layers(build: Build, inputs: Inputs) -> Callable[[], None]:
    calls = [build(inputs, layer) for layer in range(LAYERS)]

    def run() -> None:
        for call in calls:
            call()

    return run


def _planners(log: TextIO) -> None:
    """The planner's launch, by launch parameters."""
    print("\nplanner: microseconds a step, by rows to a program x warps", flush=True)
    shape = PlanShape(KV_HEADS, 64, 2 * torch.cuda.get_device_properties(0).multi_processor_count)
    for rows in PLANNED_ROWS:
        lens = torch.randint(1, 8192, (rows,), device="cuda", dtype=torch.int32)
        cells = []
        for name, config in PLANNERS.items():
            plan = partial(balanced, Contexts(lens, 8192), shape, config=config)
            us = round(graph_us(plan, calls=LAYERS), 3)
            _write(log, {"kind": "planner", "case": f"{rows} rows", "name": name, "us": us})
            cells.append((us, name))
        text = "  ".join(f"{name} {us:.2f}" for us, name in (cells[0], *sorted(cells[1:])[:5]))
        print(f"{rows:5} rows  {text}", flush=True)


def _report(log: TextIO, kind: str, results: Iterable[Result], ceilings: Ceilings) -> None:
    """Log the results of a case and print them."""
    cells, timed = [], {}
    for result in results:
        line = result.line(kind, ceilings)
        _write(log, line)
        if result.failure is not None:
            cells.append(f"{result.name} -")
            continue
        timed[result.name] = result
        rate = f"{line['tb_s']:.2f}TB/s" if result.case.is_decode else f"{line['tflops']:.0f}TF"
        cells.append(f"{result.name} {result.us:.1f} ({rate}, {line['roofline']:.0%})")
    rivals = [timed[name].rounds_us for name in RIVALS if name in timed]
    if rivals and OURS in timed:
        pairs = ratios(timed[OURS].rounds_us, *rivals)
        cells.append(f"ratio {statistics.median(pairs):.3f} [{min(pairs):.3f}, {max(pairs):.3f}]")
    print(f"{result.case.name:18} " + "  ".join(cells), flush=True)


def _ceilings(log: TextIO) -> Ceilings:
    """Bandwidth of a copy and the rate of a bfloat16 matrix product, measured now."""
    source = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mm_ms = do_bench(lambda: a @ b, return_mode="median")
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    clocks = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    ceilings = Ceilings(
        copy_tb_s=round(2 * source.nbytes / copy_ms / 1e9, 3),
        matmul_tflops=round(2 * 8192**3 / mm_ms / 1e9, 1),
    )
    facts = {"kind": "device", "device": torch.cuda.get_device_name(), "clocks": clocks}
    facts = facts | {"torch": torch.__version__, "triton": triton.__version__} | asdict(ceilings)
    _write(log, facts)
    print(facts, flush=True)
    return ceilings


def _write(log: TextIO, line: dict[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


if __name__ == "__main__":
    main()
