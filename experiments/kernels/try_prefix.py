"""Shared-prefix decode on one card: checks every variant, then times it beside plain split-KV.

    timeout 100 python -m experiments.kernels.try_prefix [NAME ...]

Each variant is compiled and checked in a process of its own, all at the same time: against float32
and against SplitKV, over groups, rows of their own and lengths in any order. One more process then
times those that passed. 32 query heads, 8 KV heads, head_dim 128, bfloat16, pages of 16, shuffled.
Microseconds of one call, medians: "cold" is a captured call after L2 was cleared, "layer" a layer
of a captured step of 32, its plan included. The last column is the ratio to SplitKV's layer."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from experiments.kernels.cases import capture
from kernels import prefix_groups
from kernels.declare import Rows
from kernels.shared_prefix import PrefixConfig, SharedPrefix
from kernels.split_kv import SplitKV

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter: tiny sizes, no figures
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
LAYERS = 32 if DEVICE == "cuda" else 2
CHECK_S, TIME_S = 50.0, 45.0
WARM = "(shapes to be timed, compiled)"
CACHE_BYTES = 8e9
"""Of the layers' caches: beyond, layers share theirs, which are far larger than L2 then."""
TOLERANCE = 1e-2
"""Of a row's result, relative (2-norm): bfloat16 weights and outputs carry 8 bits."""

P = PrefixConfig
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "128x64 w8 s2": {"prefix_config": P(num_stages=2)},
    "128x64 w8 s4": {"prefix_config": P(num_stages=4)},
    "128x32 w8 s4": {"prefix_config": P(block_n=32, num_stages=4)},
    "128x32 w8 s5": {"prefix_config": P(block_n=32, num_stages=5)},
    "64x64 w4 s3 2/SM": {"prefix_config": P(block_m=64, num_warps=4, per_sm=2)},
    "64x64 w4 s4 1/SM": {"prefix_config": P(block_m=64, num_warps=4, num_stages=4)},
}


@dataclass(frozen=True)
class Shape:
    """Groups of rows, each with own tokens after those that its group shares; loners have own."""

    groups: int
    rows: int
    shared: int
    own: int
    page_size: int = 16
    ragged: bool = False

    def lengths(self) -> list[int]:
        """Context lengths, groups taking turns; with ragged, all differ and three rows share
        nothing."""
        count = self.groups * self.rows
        if not self.ragged:
            return [self.shared + self.own] * count
        return [self.shared + 1 + row * 7 % self.own for row in range(count)] + [self.own, 1, 0]


SHARED = {
    "256x(2k+192)": Shape(1, 256, 2048, 192),
    "64x(2k+192)": Shape(1, 64, 2048, 192),
    "256x(8k+192)": Shape(1, 256, 8192, 192),
    "4x64x(2k+192)": Shape(4, 64, 2048, 192),
    "4x(8k+192)": Shape(1, 4, 8192, 192),
}
APART = {
    "256x2k": Shape(256, 1, 0, 2048),
    "16x2k": Shape(16, 1, 0, 2048),
    "1x4k": Shape(1, 1, 0, 4096),
}
CHECKED = [
    Shape(1, 40, 1024, 192),
    Shape(3, 21, 512, 200, ragged=True),
    Shape(2, 9, 700, 130, page_size=1, ragged=True),
    Shape(1, 5, 4096, 64),
]
if DEVICE == "cpu":
    CHECKED = [Shape(2, 5, 144, 40, ragged=True)]
    SHARED = {"6x(128+16)": Shape(1, 6, 128, 16)}
    APART = {"4x64": Shape(4, 1, 0, 64)}


class Inputs:
    """A step's arguments; layer i's caches are caches[i % len(caches)]."""

    def __init__(self, shape: Shape, layers: int = 1, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, page = shape, shape.page_size
        lengths = shape.lengths()
        whole = shape.shared // page
        counts = [-(-length // page) for length in lengths]
        grouped = shape.groups * shape.rows
        own = [n - whole if row < grouped else n for row, n in enumerate(counts)]
        total = shape.groups * whole + sum(own)
        order = torch.randperm(total).int() + 1
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        used = shape.groups * whole
        for row, count in enumerate(counts):
            first = count - own[row]
            group = row % shape.groups
            table[row, :first] = order[group * whole : group * whole + first]
            table[row, first:count] = order[used : used + own[row]]
            used += own[row]
        self.table = table.to(DEVICE)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        size = (total + 1, page, KV_HEADS, HEAD_DIM)
        layer_bytes = 4 * (total + 1) * page * KV_HEADS * HEAD_DIM
        distinct = max(1, min(layers, int(CACHE_BYTES / layer_bytes)))
        self.caches = [
            [torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
            for _ in range(distinct)
        ]
        for cache in (cache for pair in self.caches for cache in pair):
            cache[0] = torch.nan  # nobody's page
        self.q = torch.randn(len(lengths), HEADS, HEAD_DIM, device=DEVICE).bfloat16()
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
        sizes = page, HEADS, KV_HEADS, HEAD_DIM
        self.rows = Rows(self.table, self.lens, starts, lengths, [1] * len(lengths), *sizes)

    def call(self, kernel: SplitKV, plan: Any, layer: int = 0) -> Tensor:
        """One layer."""
        pair = self.caches[layer % len(self.caches)]
        out = kernel(self.q, *pair, self.table, self.lens, SCALE, plan=plan)
        assert isinstance(out, Tensor)
        return out

    def step(self, kernel: SplitKV, layers: int) -> Tensor:
        """The plan and all layers; the last one's result."""
        plan = kernel.plan(self.rows)
        for layer in range(layers - 1):
            self.call(kernel, plan, layer)
        return self.call(kernel, plan, layers - 1)

    def expected(self, row: int) -> Tensor:
        """float32 attention of a row in layer 0: [HEADS, HEAD_DIM]."""
        length, page = self.rows.host_context_lens[row], self.shape.page_size
        pages = self.table[row, : -(-length // page)].long()
        k, v = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(HEADS // KV_HEADS, 1)
            for cache in self.caches[0]
        )
        scores = torch.einsum("hd,khd->hk", self.q[row].float(), k) * SCALE
        return torch.einsum("hk,khd->hd", scores.softmax(-1), v)


def build(name: str, **more: Any) -> SharedPrefix:
    """A variant. min_split_tokens is the planner's own and stays set until the next one."""
    options = VARIANTS[name] | more
    prefix_groups.MIN_SPLIT_TOKENS = options.pop("min_split_tokens", 256)
    return SharedPrefix(**options)


def check(name: str) -> float:
    """Largest relative error over the checked shapes, the second layer's short way included.
    Compiles what `measure` runs. Raises AssertionError."""
    worst = 0.0
    for shape in CHECKED:
        inputs = Inputs(shape)
        kernel = build(name, min_saved_bytes=0)
        plan = kernel.plan(inputs.rows)
        plain = inputs.call(SplitKV(), None).float()
        for _ in range(3):
            spoilt = torch.full_like(inputs.q, torch.nan)  # the output is likely to land here
            del spoilt
            out = inputs.call(kernel, plan).float()
            worst = max(worst, compare(out, plain, f"{shape} against SplitKV"))
        found = plan.read()["None"]["prefixes"]
        tokens = sorted(found["prefix_tokens"])
        whole = shape.shared // shape.page_size * shape.page_size
        assert tokens == [whole] * shape.groups, f"{shape}: shares {found}"
        for row in range(0, len(inputs.q), 7):
            if inputs.rows.host_context_lens[row]:
                error = compare(out[row], inputs.expected(row), f"{shape} row {row}")
                worst = max(worst, error)
    return worst


def warm() -> None:
    """Compiles what else `time_all` runs."""
    for shape in (SHARED | APART).values():
        inputs = Inputs(shape)
        for kernel in (SplitKV(), build("default")):
            inputs.call(kernel, None)
    print("done")


def compare(out: Tensor, expected: Tensor, what: str) -> float:
    """Largest relative error of a row; NaN fails too."""
    norm = expected.norm(dim=-1).clamp_min(1e-6)
    error = ((out - expected).norm(dim=-1) / norm).max().item()
    assert error < TOLERANCE, f"{what}: error {error}"
    return error


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """A graph of one run."""
    return run if DEVICE == "cpu" else capture(run).replay


def cold_us(replay: Callable[[], object]) -> float:
    """Median microseconds after L2 was cleared."""
    if DEVICE == "cpu":
        replay()
        return 1.0
    return triton.testing.do_bench(replay, warmup=10, rep=40, return_mode="median") * 1e3


def step_us(replay: Callable[[], object], repeats: int = 9) -> float:
    """Median microseconds of a replay."""
    if DEVICE == "cpu":
        replay()
        return 1.0
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[2:])[repeats // 2]


def measure(inputs: Inputs, kernel: SplitKV) -> tuple[float, float, float]:
    """Microseconds: a cold call, a layer of a step with its plan, the plan."""
    plan = kernel.plan(inputs.rows)
    inputs.call(kernel, plan)  # the tables are made here
    cold = cold_us(captured(lambda: inputs.call(kernel, plan)))
    layer = step_us(captured(lambda: inputs.step(kernel, LAYERS))) / LAYERS
    planned = step_us(captured(lambda: inputs.step(kernel, 1)))
    return cold, layer, planned - step_us(captured(lambda: inputs.call(kernel, plan)))


def time_all(names: list[str]) -> None:
    """The table, best variant of each shape marked."""
    print(f"{'us':34}{'cold':>9}{'layer':>9}{'plan':>7}{'ratio':>8}")
    for label, shape in (SHARED | APART).items():
        inputs = Inputs(shape, LAYERS)
        figures = {"SplitKV": measure(inputs, SplitKV())}
        chosen = names if label in SHARED else [name for name in names if name in names[:2]]
        for name in chosen:
            kernel = build(name)
            figures[name] = measure(inputs, kernel)
        again = measure(inputs, SplitKV())
        plain = min(figures["SplitKV"][1], again[1])
        plan = kernel.plan(inputs.rows)
        inputs.call(kernel, plan)
        found = plan.read()["None"].get("prefixes", {"splits": []})
        print(f"-- {label}: prefix splits {found['splits'][:4]}")
        best = min((us[1] for name, us in figures.items() if name != "SplitKV"), default=0.0)
        for name, (cold, layer, planned) in figures.items():
            mark = " *" if layer == best and name != "SplitKV" else ""
            line = f"{name:34}{cold:9.1f}{layer:9.1f}{planned:7.1f}{layer / plain:8.3f}{mark}"
            print(line, flush=True)
        del inputs


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.kernels.try_prefix", *arguments]
    root = Path(__file__).resolve().parent.parent.parent
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=root, text=True, **pipes)


def output_of(child: subprocess.Popen[str], limit_s: float) -> str:
    """What a process printed by its end, or until it was killed at the limit."""
    try:
        return child.communicate(timeout=max(1.0, limit_s))[0]
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()[0]


def main(names: list[str]) -> None:
    """Check all at once, then time."""
    begin = time.perf_counter()
    children = {name: start("--check", name) for name in names} | {WARM: start("--warm")}
    passed = []
    for name, child in children.items():
        lines = output_of(child, begin + CHECK_S - time.perf_counter()).strip().splitlines()
        if child.returncode == 0 and name != WARM:
            passed.append(name)
        print(f"{name:34}{(lines or ['no output'])[-1][-120:]}", flush=True)
    print(f"checked in {time.perf_counter() - begin:.0f} s", flush=True)
    if passed:
        print(output_of(start("--time", json.dumps(passed)), TIME_S))
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        print(f"passed, largest error {check(sys.argv[2]):.4f}")
    elif sys.argv[1:2] == ["--warm"]:
        warm()
    elif sys.argv[1:2] == ["--time"]:
        time_all(json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:] or list(VARIANTS))
