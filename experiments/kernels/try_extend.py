"""Forms of ragged prefill on one card: checks each against float32, then times them side by side.

    python -m experiments.kernels.try_extend [--only TEXT ...] [--gather] [--mixed] [--rounds N]

Each form is checked in a process of its own with a time limit, all at once, since a kernel that is
wrong may never end; those that pass are then timed in one process: replays of a captured graph, the
forms in turn, the L2 cache cleared before each, medians over the rounds. 32 query heads, 8 KV
heads, head_dim 128, bfloat16, causal, shuffled pages. Copies into a workspace are counted, planning
is not (all layers share it); rows without a cached prefix are read where the model left them, as
in service, unless --gather. TFLOP/s, the best starred.

--mixed: a step of one chunk and 63 decodes instead, in microseconds: its parts, both in turn and on
two streams, in a graph and called one after another."""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from experiments.kernels.cases import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MIXED,
    PREFILL,
    SCALE,
    Case,
    Inputs,
    capture,
    make,
)
from kernels import extend as plain
from kernels import extend_dense as dense
from kernels.extend_tma import DenseConfig
from kernels.split_kv import SplitKV

Call = Callable[[], object]
CHECK_S = 75.0
TOLERANCE = 3e-2  # bfloat16: 8 bits of mantissa in inputs, weights and outputs
EVERY = 1 << 40  # bytes of K and V: all heads at once

P, D = plain.ExtendConfig, DenseConfig
FORMS: dict[str, DenseConfig | plain.ExtendConfig] = {
    "plain 64x64 packed head-fast": P(head_fast=True),
    "tma 64x64 head-fast": D(head_fast=True),
    "pipelined 64x64 s3": D("pipelined"),
    "pipelined 64x64 s3, all heads": D("pipelined", kv_bytes=EVERY),
    "pipelined 64x64 s3, one KV head": D("pipelined", kv_bytes=1),
    "pipelined 128x64 s4": D("pipelined", 128, 64, 8, 4),
    "paired 64x64 s3": D("paired"),
    "paired 64x64 s2": D("paired", num_stages=2),
}
CUDNN = "torch cuDNN, contiguous"

CHECKS = (
    # Rows of one key tile, of several, odd ends, a context beside few new tokens, single tokens.
    Case("mixed", (130, 300, 1, 200, 17), (700, 300, 65, 513, 40)),
    Case("mixed, page 1", (130, 300, 1, 200, 17), (700, 300, 65, 513, 40), 1),
    Case("fresh", (300, 129, 20, 400, 1), (300, 129, 20, 400, 1)),
    Case("few tiles", (256,), (2200,)),
    Case("many tiles", (1500, 64, 65), (1500, 64, 4000)),
)


def extend(config: DenseConfig | plain.ExtendConfig, inputs: Inputs, new: bool = True) -> Call:
    """The form over all rows but decode ones, as a function of nothing, its plan made. new: hand in
    the new tokens' K and V."""
    rows = sum(length > 1 for length in inputs.case.new) if MIXED is inputs.case else None
    count = len(inputs.case.new) if rows is None else rows
    part = inputs.rows(0, count)
    q = inputs.q[: sum(inputs.case.new[:count])]
    table, lens, starts = part.page_table, part.context_lens, part.query_starts
    arguments = (q, *inputs.caches[0], table, lens, starts, SCALE)
    if isinstance(config, plain.ExtendConfig):
        plan = plain.plan_extend(part)
        return lambda: plain.extend(*arguments, plan=plan, config=config)
    step = dense.plan_extend(part, config)
    if step.long_lens:
        step.chosen[dense.choice_key(q, inputs.caches[0][0])] = (
            config  # no fallback, and no process to try the compiler
        )
    given = dict(zip(("k_new", "v_new"), inputs.new_kv(0, count), strict=True)) if new else {}
    return lambda: dense.extend(*arguments, plan=step, **given)


def cudnn(inputs: Inputs) -> Call | None:
    """torch's attention over contiguous K and V, where its causal mask fits."""
    case = inputs.case
    if len(set(case.new)) > 1 or case.new != case.context or case.page_size == 1:
        return None
    pairs = [inputs.contiguous(row) for row in range(len(case.new))]
    k, v = (torch.stack(parts).transpose(1, 2) for parts in zip(*pairs, strict=True))
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
    q = inputs.q.view(len(pairs), -1, HEADS, HEAD_DIM).transpose(1, 2)

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def poisoned(case: Case) -> Inputs:
    """Inputs whose pool is NaN wherever no row has a token."""
    inputs = make(case)
    used = torch.zeros(inputs.caches[0][0].shape[:2], dtype=torch.bool, device="cuda")
    for row, total in enumerate(case.context):
        at = torch.arange(total, device="cuda")
        used[inputs.table[row, at // case.page_size].long(), at % case.page_size] = True
    for cache in inputs.caches[0]:
        cache[~used] = torch.nan
    return inputs


def expected(inputs: Inputs) -> Tensor:
    """float32 attention of every new token."""
    parts, begin = [], 0
    for row, length in enumerate(inputs.case.new):
        q = inputs.q[begin : begin + length].float()
        begin += length
        k, v = (
            one.float().repeat_interleave(HEADS // KV_HEADS, 1) for one in inputs.contiguous(row)
        )
        scores = torch.einsum("thd,chd->htc", q, k) * SCALE
        at = torch.arange(k.shape[0], device="cuda")
        scores.masked_fill_(at > at[-length:, None], -torch.inf)
        parts.append(torch.einsum("htc,chd->thd", scores.softmax(-1), v))
    return torch.cat(parts)


def check(name: str) -> None:
    """Print the largest error over CHECKS, with new K and V in place and gathered, heads all at
    once and a few at a time; raises AssertionError for one too large."""
    config, worst = FORMS[name], 0.0
    kinds = [config]
    if isinstance(config, DenseConfig):
        kinds = [replace(config, min_tokens=128), replace(config, min_tokens=1, kv_bytes=1)]
    for case in CHECKS:
        inputs = poisoned(case)
        wanted = expected(inputs)
        for kind in kinds:
            for new in (False, True):
                spoilt = torch.full_like(inputs.q, torch.nan)  # the output is likely to land here
                del spoilt
                out = extend(kind, inputs, new)()
                error = (out.float() - wanted).abs().max().item()
                assert error < TOLERANCE, f"error {error} in {case.name}, {kind}, new {new}"
                worst = max(worst, error)
    print(f"largest error {worst:.4f}", flush=True)


def passing(names: Sequence[str]) -> list[str]:
    """Those that pass `check`, all tried at once; prints the answers."""
    root = Path(__file__).resolve().parent.parent.parent
    command = [sys.executable, "-m", "experiments.kernels.try_extend", "--check"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = {name: subprocess.Popen([*command, name], cwd=root, **pipes) for name in names}
    limit, passed = time.monotonic() + CHECK_S, []
    for name, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(1.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = f"no end after {CHECK_S:g} s"
        print(
            f"{name:36} {text.strip().splitlines()[-1][-150:] if text.strip() else '-'}", flush=True
        )
        if process.poll() == 0:
            passed.append(name)
    return passed


def rounds_us(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median microseconds of each call's captured graph; the calls take turns."""
    graphs = {name: capture(call) for name, call in calls.items()}
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def table(names: Sequence[str], gather: bool, rounds: int) -> None:
    """TFLOP/s of each form in each of PERF's prefill cases but the mixed one."""
    cases = [case for case in PREFILL if case is not MIXED]
    figures: dict[str, dict[str, float]] = {name: {} for name in (*names, CUDNN)}
    for case in cases:
        inputs = make(case)
        calls = {name: extend(FORMS[name], inputs, not gather) for name in names}
        peer = cudnn(inputs)
        if peer is not None:
            calls[CUDNN] = peer
        for name, us in rounds_us(calls, rounds).items():
            figures[name][case.name] = case.flops / us / 1e6
        del inputs, calls, peer
        torch.cuda.empty_cache()
    best = {case.name: max(figures[name].get(case.name, 0) for name in names) for case in cases}
    print(f"{'TFLOP/s':36}" + "".join(f"{case.name:>12}" for case in cases))
    for name, row in figures.items():
        cells = "".join(_cell(row.get(case.name), best[case.name]) for case in cases)
        print(f"{name:36}{cells}", flush=True)


def _cell(value: float | None, best: float) -> str:
    if value is None:
        return f"{'-':>12}"
    return f"{value:11.1f}{'*' if value == best else ' '}"


def mixed(rounds: int) -> None:
    """Microseconds of a step of one chunk and many decodes, its parts, and both at once."""
    inputs = make(MIXED)
    begin = sum(length > 1 for length in MIXED.new)
    part = inputs.rows(begin, len(MIXED.new))
    q, kernel = inputs.q[sum(MIXED.new[:begin]) :], SplitKV()
    plan = kernel.plan(part)
    tables = part.page_table, part.context_lens, SCALE
    side = torch.cuda.Stream()

    def decode() -> object:
        return kernel(q, *inputs.caches[0], *tables, plan=plan)

    def both(chunk: Call) -> Call:
        return lambda: (chunk(), decode())

    def beside(chunk: Call, chunk_first: bool) -> Call:
        def run() -> None:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            if not chunk_first:
                decode()
            with torch.cuda.stream(side):
                chunk()
            if chunk_first:
                decode()
            main.wait_stream(side)

        return run

    chunks = {f"plain {m}x{n} w{w}, splits {s}": P(m, n, w, splits=s)
              for m, n, w in ((64, 64, 4), (128, 64, 8)) for s in (1, 2)}  # fmt: skip
    chunks["pipelined 64x64 s3"] = FORMS["pipelined 64x64 s3"]
    calls: dict[str, Call] = {"decode alone": decode}
    for name, config in chunks.items():
        kept = replace(config, min_tokens=1) if isinstance(config, DenseConfig) else config
        call = extend(kept, inputs)
        calls |= {name: call, f"{name} + decode": both(call)}
        calls |= {f"{name} | decode": beside(call, True), f"decode | {name}": beside(call, False)}
    us = rounds_us(calls, rounds)
    print(f"{'us: 256 + 4k beside 63 x 2k':36}{'graph':>9}{'eager':>9}")
    for name, call in calls.items():
        eager = do_bench(call, warmup=5, rep=30, return_mode="median") * 1e3
        print(f"{name:36}{us[name]:9.1f}{eager:9.1f}", flush=True)


def main() -> None:
    """Check, then time what passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="forms with this in their names")
    parser.add_argument("--gather", action="store_true")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", help="check one form and stop")
    arguments = parser.parse_args()
    if arguments.check is not None:
        check(arguments.check)
    elif arguments.mixed:
        mixed(arguments.rounds)
    else:
        names = [name for name in FORMS if any(text in name for text in arguments.only)]
        table(passing(names), arguments.gather, arguments.rounds)


if __name__ == "__main__":
    main()
