"""Ragged prefill on one card: checks every variant against float32, then times it.

    python -m experiments.kernels.try_extend [NAME ...]

Each variant has a process of its own with a time limit: all compile and check at the same time,
then each is timed alone. 32 query heads, 8 KV heads, head_dim 128, bfloat16, causal, shuffled
pages, cold L2, medians of a captured graph's replays; gathering into a workspace is counted,
planning is not (all layers share it). TFLOP/s; columns named us are in microseconds, "cpu" that of
the host for a call of the later layers, at 2k+6k."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import extend as plain
from kernels import extend_dense as dense
from kernels.declare import Rows

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
HOST = "cpu us"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECK_S, TIME_S = 110.0, 20.0
TOLERANCE = 1.5e-2  # bfloat16: 8 bits of mantissa in inputs, weights and outputs

Lengths = list[tuple[int, int]]
SHAPES = {  # rows of (context, new tokens), page size
    "2k": ([(2048, 2048)], 16),
    "8k": ([(8192, 8192)], 16),
    "4x8k": ([(8192, 8192)] * 4, 16),
    "2k+6k": ([(8192, 2048)], 16),
    "2k+30k": ([(32768, 2048)], 16),
    "8k page 1": ([(8192, 8192)], 1),
    "256+4k us": ([(4352, 256)], 16),
}

COLUMNS = (*SHAPES, HOST)
P, D = plain.ExtendConfig, dense.DenseConfig
WIDE = {"block_m": 128, "num_warps": 8, "head_fast": True}
VARIANTS = {
    "plain 64x64 packed head-fast": P(head_fast=True),
    "tma 64x64": D(),
    "tma 64x64 head-fast": D(head_fast=True),
    "tma 128x64 w8 s2 r128 (2/SM)": D(**WIDE, num_stages=2, max_registers=128),
    "pipelined 128x128 s2": D("pipelined", **WIDE, block_n=128, num_stages=2),
    "pipelined 128x64 s4": D("pipelined", **WIDE, block_n=64, num_stages=4),
    "pipelined 64x64 s3 (2/SM)": D("pipelined", head_fast=True),
    "specialised 128x128 s2": D("specialised", **WIDE, block_n=128, num_stages=2),
    "specialised 128x64 s4": D("specialised", **WIDE, block_n=64, num_stages=4),
    "torch cuDNN, contiguous": None,
}
MORE = {  # by name only
    "specialised 128x128 s2 new kv": VARIANTS["specialised 128x128 s2"],
    "specialised 128x64 s3": D("specialised", **WIDE, block_n=64, num_stages=3),
    "pipelined 128x128 s2 tile-fast": replace(VARIANTS["pipelined 128x128 s2"], head_fast=False),
    "pipelined 128x64 s3": D("pipelined", **WIDE, block_n=64, num_stages=3),
    "pipelined 64x64 s2": D("pipelined", head_fast=True, num_stages=2),
    "plain 64x64 packed": P(),
    "plain 128x64 w8 packed": P(block_m=128, num_warps=8),
}
ALL = VARIANTS | MORE


class Inputs:
    """A kernel's arguments for rows of (context, new), on shuffled pages of a poisoned pool."""

    def __init__(self, rows: Lengths, page_size: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        contexts, new = [row[0] for row in rows], [row[1] for row in rows]
        counts = [-(-context // page_size) for context in contexts]
        order = torch.randperm(sum(counts), device=DEVICE).int() + 1
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32, device=DEVICE)
        shape = sum(counts) + 1, page_size, KV_HEADS, HEAD_DIM
        self.caches = [
            torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
        ]
        sizes = sum(new), KV_HEADS, HEAD_DIM
        self.new = [torch.empty(sizes, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        self.contiguous, used, begin = [], 0, 0
        for i, (context, length) in enumerate(rows):
            table[i, : counts[i]] = order[used : used + counts[i]]
            used += counts[i]
            at = torch.arange(context, device=DEVICE)
            slots = table[i, at // page_size].long() * page_size + at % page_size
            pair = torch.randn(2, context, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16()
            for cache, fresh, values in zip(self.caches, self.new, pair, strict=True):
                cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = values
                fresh[begin : begin + length] = values[-length:]
            self.contiguous.append(pair)
            begin += length
        self.rows = rows
        self.q = torch.randn(sum(new), HEADS, HEAD_DIM, device=DEVICE).bfloat16()
        starts = torch.tensor([0, *new]).cumsum(0).int().to(DEVICE)
        lens = torch.tensor(contexts).int().to(DEVICE)
        sizes = page_size, HEADS, KV_HEADS, HEAD_DIM
        self.part = Rows(table, lens, starts, contexts, new, *sizes)
        self.arguments = self.q, *self.caches, table, lens, starts, SCALE

    def flops(self) -> float:
        """Counted exactly: 4 * heads * dim for each query and key it sees."""
        pairs = sum(n * (c - n) + n * (n + 1) / 2 for c, n in self.rows)
        return 4 * HEADS * HEAD_DIM * pairs

    def expected(self) -> torch.Tensor:
        """float32 attention, row by row."""
        parts, begin = [], 0
        for (context, length), (k, v) in zip(self.rows, self.contiguous, strict=True):
            q = self.q[begin : begin + length].float()
            begin += length
            k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            scores = torch.einsum("thd,chd->htc", q, k) * SCALE
            at = torch.arange(context, device=DEVICE)
            scores.masked_fill_(at > at[-length:, None], -torch.inf)
            parts.append(torch.einsum("htc,chd->thd", scores.softmax(-1), v))
        return torch.cat(parts)


def call(name: str, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """The variant as a function of nothing, its plan made."""
    config = ALL[name]
    if config is None:
        q = inputs.q.view(len(inputs.rows), -1, HEADS, HEAD_DIM).transpose(1, 2)
        kv = torch.stack(inputs.contiguous).transpose(0, 1).transpose(2, 3)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in kv)

        def attend() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend
    if isinstance(config, plain.ExtendConfig):
        plan = plain.plan_extend(inputs.part)
        return lambda: plain.extend(*inputs.arguments, plan=plan, config=config)
    plan = dense.plan_extend(inputs.part, replace(config, min_tokens=128))
    new = dict(zip(("k_new", "v_new"), inputs.new, strict=True)) if "new kv" in name else {}
    return lambda: dense.extend(*inputs.arguments, plan=plan, **new)


def check(name: str) -> float:
    """Largest error over mixed rows at pages 16 and 1, with and without cached prefixes. Compiles
    what `measure` runs."""
    worst = 0.0
    if ALL[name] is None:
        return worst
    if isinstance(ALL[name], dense.DenseConfig):
        assert dense.takes_dense(
            torch.empty(1, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE), ALL[name]
        ), "does not compile"
    mixed = [(700, 130), (300, 300), (65, 1), (513, 200), (40, 17)]
    fresh = [(300, 300), (129, 129), (20, 20), (400, 400)]
    for rows, page_size in ((mixed, 16), (mixed, 1), (fresh, 16), ([(2200, 256)], 16)):
        inputs = Inputs(rows, page_size)
        expected = inputs.expected()
        spoilt = torch.full_like(inputs.q, torch.nan)  # the output is likely to land here
        del spoilt
        out = call(name, inputs)().float()
        error = (out - expected).abs().max().item()
        if not error < TOLERANCE * 2:  # NaN too
            raise AssertionError(f"error {error} on {rows} at page {page_size}")
        worst = max(worst, error)
    return worst


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """A graph of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def host_us(run: Callable[[], torch.Tensor], calls: int = 50) -> float:
    """Microseconds that a call takes before it returns: the least of five means."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return best


def measure(name: str) -> dict[str, float]:
    """{shape: TFLOP/s, or microseconds}."""
    figures = {}
    for shape, (rows, page_size) in SHAPES.items():
        if ALL[name] is None and (rows[0][0] != rows[0][1] or page_size == 1):
            continue
        inputs = Inputs(rows, page_size)
        run = call(name, inputs)
        if shape == "2k+6k":
            figures[HOST] = host_us(run)
        replay = captured(run)
        ms = triton.testing.do_bench(replay, warmup=15, rep=60, return_mode="median")
        figures[shape] = ms * 1e3 if shape.endswith("us") else inputs.flops() / ms / 1e9
    return figures


def child(name: str) -> None:
    """One variant's process: a line when checked, a line when timed."""
    print("checked", check(name), flush=True)
    sys.stdin.readline()
    print("timed", json.dumps(measure(name)), flush=True)


class Child:
    """A variant's process, with a time limit on each of its answers."""

    def __init__(self, name: str) -> None:
        self.name, self.log = name, []
        command = [sys.executable, "-m", "experiments.kernels.try_extend", "--child", name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        root = Path(__file__).resolve().parent.parent.parent
        self.process = subprocess.Popen(command, cwd=root, text=True, **pipes)

    def answer(self, word: str, limit_s: float) -> str | None:
        """The rest of the line that begins with `word`; None after a failure or the limit."""
        timer = threading.Timer(limit_s, self.process.kill)
        timer.start()
        for line in self.process.stdout:
            if line.startswith(word):
                timer.cancel()
                return line[len(word) :].strip()
            self.log.append(line.rstrip())
        timer.cancel()
        return None


def main(names: list[str]) -> None:
    """Check all, time one after another, print the table."""
    children = [Child(name) for name in names]
    answers = {}

    def wait(one: Child) -> None:
        answers[one.name] = one.answer("checked", CHECK_S)

    threads = [threading.Thread(target=wait, args=(one,)) for one in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{'variant':36}" + "".join(f"{shape:>11}" for shape in COLUMNS) + "  max error")
    for one in children:
        error, timed = answers[one.name], None
        if error is not None:
            one.process.stdin.write("go\n")
            one.process.stdin.flush()
            timed = one.answer("timed", TIME_S)
        if timed is None:
            one.process.kill()
            print(f"{one.name:36} failed: {' | '.join(one.log[-2:])[-150:]}", flush=True)
            continue
        cells = json.loads(timed)
        row = "".join(f"{cells[s]:11.1f}" if s in cells else f"{'-':>11}" for s in COLUMNS)
        print(f"{one.name:36}{row}  {float(error):.4f}", flush=True)
        one.process.wait(10)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main(sys.argv[1:] or list(VARIANTS))
