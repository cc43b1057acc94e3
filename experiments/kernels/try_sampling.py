"""The sampling kernels on one card: checked against the torch sampler, then timed.

    python -m experiments.kernels.try_sampling

Every variant is compiled in a process of its own, all at the same time; then one process checks and
one times, line by line; a line that does not come in time is skipped. Medians of one captured graph
replay with a cold L2, in microseconds; `torch` is the executor's sampler without kernels. Filters:
top-k 50, top-p 0.9; logits are normal with the standard deviation given as `spread`: with 3 a
top-p row keeps thousands of tokens, with 1 most of the vocabulary, with 12 a handful."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from core.launch import RowSetup
from core.request import SamplingParams
from kernels.logprobs import logprobs
from kernels.penalties import penalise
from kernels.philox import noise_rows
from kernels.sampling import SamplingConfig, draw, draw_and_thresholds
from kernels.vocabulary import Parameters, ScanConfig, scan
from plugins.executor.logprobs import score
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.philox import gumbel_rows
from plugins.executor.rows import SamplingRows
from plugins.executor.sampler import SamplePlan, plan_samples, sample
from plugins.executor.upload import upload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILE_S, CHECK_S, LINE_S = 60.0, 40.0, 15.0
COLUMNS = ("temperature", "top_k", "top_p", "min_p_log", "seed", "position", "choice")
MODES = {
    "greedy": SamplingParams(temperature=0),
    "temper": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=0.8, top_k=50),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "both": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "k1000+p": SamplingParams(temperature=0.8, top_k=1000, top_p=0.9),
}
MIXED = (*MODES.values(), SamplingParams(min_p=0.05), SamplingParams(top_k=9000, top_p=0.97))
BASE = SamplingConfig()
VARIANTS = {
    "base": BASE,
    "chunk 4096, 8 warps": replace(BASE, scan=ScanConfig(4096, 8)),
    "chunk 2048, 4 warps": replace(BASE, scan=ScanConfig(2048, 4)),
    "chunk 8192, 8 warps": replace(BASE, scan=ScanConfig(8192, 8)),
    "8 finishing warps": replace(BASE, num_warps=8),
    "4 pivots": replace(BASE, pivots=4, width=128, stages=4),
    "16 pivots": replace(BASE, pivots=16, width=32),
    "capacity 2048": replace(BASE, capacity=2048, tile=64),
    "capacity 8192": replace(BASE, capacity=8192),
}
SHAPES = [(1, 131_072), (16, 131_072), (128, 131_072), (512, 131_072), (128, 151_936)]
SPREADS = (3.0, 1.0, 12.0)
if DEVICE.type == "cpu":  # a rehearsal under the interpreter
    BASE = VARIANTS["base"] = SamplingConfig(ScanConfig(512), capacity=256, tile=16, num_warps=4)
    VARIANTS = {"base": BASE}
    SHAPES, SPREADS = [(2, 1024)], (3.0,)


class Case:
    """Rows of logits, row i by params[i % len(params)], with both samplers' inputs."""

    def __init__(self, rows: int, vocab_size: int, spread: float, params: Any) -> None:
        self.logits = torch.randn(rows, vocab_size, device=DEVICE) * spread
        self.rows = SamplingRows(rows, vocab_size)
        for row in range(rows):
            one = params[row % len(params)]
            self.rows.set(RowSetup(row, one, 1, np.zeros(1, np.int32), row * 7919, row % 2, ()))
        self.penalties = PenaltyCounts(rows, vocab_size, DEVICE)
        self.ids = np.arange(rows)

    def plan(self, for_kernels: bool) -> tuple[SamplePlan, dict[str, torch.Tensor]]:
        plan = plan_samples(self.rows, self.ids, self.ids + 5, for_kernels=for_kernels)
        return plan, upload(plan.arrays, DEVICE)

    def parameters(self) -> Parameters:
        inputs = self.plan(True)[1]
        return Parameters(**{name: inputs[name] for name in COLUMNS})

    def torch_tokens(self) -> torch.Tensor:
        return sample(self.logits, *self.plan(False), self.penalties).tokens


def check() -> None:
    """Raise unless the kernels agree with torch."""
    seeds = torch.tensor([5, -5, 2**62 + 5], device=DEVICE)
    _, noise = noise_rows(seeds, seeds * 0 + 3, seeds * 0 + 1, 70_001)
    error = (noise - gumbel_rows(seeds, seeds * 0 + 3, seeds * 0 + 1, 70_001)).abs().max().item()
    print(f"  noise: largest difference {error:.1e}", flush=True)
    assert error < 4e-6
    for _, vocab_size in SHAPES[-2:]:
        for spread in SPREADS:
            case = Case(64 if DEVICE.type == "cuda" else 8, vocab_size, spread, MIXED)
            expected = case.torch_tokens()
            parameters = case.parameters()
            tokens, least = draw_and_thresholds(case.logits, parameters, BASE)
            differ = (tokens != expected).nonzero().flatten().tolist()
            again = draw(case.logits, parameters, BASE)
            alone = torch.cat([draw(case.logits[i : i + 1], one(parameters, i)) for i in range(8)])
            repeated, apart = int((again != tokens).sum()), int((alone != tokens[:8]).sum())
            print(
                f"  {vocab_size} x {spread:g}: {len(differ)} of {len(tokens)} tokens differ from "
                f"torch {differ[:8]}, {repeated} on repeat, {apart} alone; "
                f"top-p keeps {kept(case, least)[3::8][:4]}",
                flush=True,
            )
            assert len(differ) <= 1, "more than a rounding of the threshold explains"
            assert torch.equal(again, tokens)
            assert torch.equal(alone, tokens[:8])
    chosen, ids, values = logprobs(case.logits, expected, 20)
    reference = score(case.logits, expected, 20)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(ids.cpu(), reference.top_ids)
    torch.testing.assert_close(values.cpu(), reference.top_logprobs, atol=2e-5, rtol=0)
    torch.testing.assert_close(chosen.cpu(), reference.chosen, atol=2e-5, rtol=0)
    print("  log-probabilities agree", flush=True)


def one(parameters: Parameters, row: int) -> Parameters:
    return Parameters(*(column[row : row + 1].clone() for column in parameters.columns()))


def kept(case: Case, least: torch.Tensor) -> list[int]:
    peak = case.logits.amax(-1, keepdim=True)
    temperature = torch.from_numpy(case.rows.temperature).float().to(DEVICE).unsqueeze(1)
    counts: list[int] = ((case.logits - peak) / temperature >= least[:, None]).sum(-1).tolist()
    return counts


def micros(call: Callable[[], Any], captured: bool = True) -> float:
    """Median with a cold L2."""
    call()
    if DEVICE.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    bench = triton.testing.do_bench
    return 1e3 * float(bench(call, warmup=3, rep=12, return_mode="median"))


def time_modes(rows: int, vocab_size: int, spread: float, config: SamplingConfig) -> str:
    cells = []
    for params in MODES.values():
        case = Case(rows, vocab_size, spread, (params,))
        parameters = case.parameters()
        cells.append(micros(partial(draw, case.logits, parameters, config)))
    return "".join(f"{cell:9.1f}" for cell in cells)


def time_torch(rows: int, vocab_size: int, spread: float) -> str:
    cells = []
    for params in MODES.values():
        case = Case(rows, vocab_size, spread, (params,))
        plan, inputs = case.plan(False)
        cells.append(micros(partial(sample, case.logits, plan, inputs, case.penalties), False))
    return "".join(f"{cell:9.1f}" for cell in cells)


def time_parts(rows: int, vocab_size: int) -> str:
    case = Case(rows, vocab_size, 3.0, (MODES["both"],))
    mixed = Case(rows, vocab_size, 3.0, MIXED)
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    outputs = torch.zeros(rows, vocab_size, dtype=torch.int32, device=DEVICE)
    factors = [torch.full((rows,), value, device=DEVICE) for value in (1.1, 0.1, 0.1)]
    at = torch.arange(rows, device=DEVICE)
    parameters, mixed_parameters = case.parameters(), mixed.parameters()
    parts = {
        "one copy": partial(torch.empty_like(case.logits).copy_, case.logits),
        "scan": partial(scan, case.logits, parameters, BASE.scan),
        "mixed rows": partial(draw, mixed.logits, mixed_parameters, BASE),
        "logprobs 20": partial(logprobs, case.logits, tokens, min(20, vocab_size)),
        "penalties": partial(penalise, case.logits, at, at, outputs, outputs.bool(), *factors),
    }
    return "  ".join(f"{name} {micros(call):.1f}" for name, call in parts.items())


def lines() -> list[tuple[str, Callable[[], str]]]:
    """Everything that is timed: label and call."""
    out: list[tuple[str, Callable[[], str]]] = []
    for rows, vocab_size in SHAPES:
        for spread in SPREADS:
            label = f"{rows} x {vocab_size}, spread {spread:g}"
            out.append((label, partial(time_modes, rows, vocab_size, spread, BASE)))
    rows, vocab_size = SHAPES[min(2, len(SHAPES) - 1)]
    for name, config in VARIANTS.items():
        for spread in SPREADS[:2]:
            label = f"{name}, spread {spread:g}"
            out.append((label, partial(time_modes, rows, vocab_size, spread, config)))
    out.append(("torch, spread 3", partial(time_torch, rows, vocab_size, 3.0)))
    out.append((f"parts, {rows} rows", partial(time_parts, rows, vocab_size)))
    return out


def compile_variant(name: str) -> None:
    shapes = SHAPES if name == "base" else SHAPES[:3]
    for vocab_size in {vocab for _, vocab in shapes}:
        case = Case(2, vocab_size, 3.0, (MODES["both"],))
        draw(case.logits, case.parameters(), VARIANTS[name])


def time_from(first: int) -> None:
    for index, (label, call) in enumerate(lines()[first:], first):
        print(f"start {index}", flush=True)
        try:
            text = call()
        except Exception as error:  # a variant that does not fit the card must not end the run
            text = f"  {type(error).__name__}: {str(error)[:80]}"
        print(f"{label:32s}{text}", flush=True)


def child(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.kernels.try_sampling", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait(process: subprocess.Popen[str], seconds: float) -> str:
    try:
        return process.communicate(timeout=max(seconds, 0.1))[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return (process.communicate()[0] or "") + "  did not end in time\n"


def time_all() -> None:
    """Print a line each; a line that does not come in time is skipped."""
    first, total = 0, len(lines())
    while first < total:
        process = child("time", str(first))
        timer = threading.Timer(2 * LINE_S, process.kill)  # with the start of Python
        timer.start()
        for line in process.stdout or ():
            timer.cancel()
            timer = threading.Timer(LINE_S, process.kill)
            timer.start()
            if line.startswith("start "):
                first = int(line.split()[1])
            else:
                print(line, end="", flush=True)
        ended = process.wait() == 0
        timer.cancel()
        if not ended:
            print(f"line {first} did not end", flush=True)
        first = total if ended else first + 1


def main() -> None:
    if sys.argv[1:2] == ["compile"]:
        compile_variant(sys.argv[2])
        return
    if sys.argv[1:2] == ["check"]:
        check()
        return
    if sys.argv[1:2] == ["time"]:
        time_from(int(sys.argv[2]))
        return
    begin = time.monotonic()
    processes = {name: child("compile", name) for name in VARIANTS}
    for name, process in processes.items():
        text = wait(process, COMPILE_S - (time.monotonic() - begin))
        if process.returncode:
            print(f"variant {name} did not compile or run {text}")
    print(f"compiled in {time.monotonic() - begin:.0f} s; checks:")
    checking = child("check")
    print(wait(checking, CHECK_S), end="")
    if checking.returncode:
        sys.exit("the kernels are wrong: not timed")
    print(f"{'microseconds':32s}" + "".join(f"{name:>9s}" for name in MODES))
    time_all()
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
