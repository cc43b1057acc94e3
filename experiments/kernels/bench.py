"""Attention kernels beside torch's and, where they are installed, others', on one card in one run.

    python -m experiments.kernels.bench [--peers FILE] [--rounds 5] [--out FILE]

--peers: a Python file with a dict IMPL of name -> function(inputs, new, context, page_size) ->
(call, out), as FA3, FlashInfer and vLLM's Triton kernel are wrapped for these tables. Every
implementation is checked against float32 on the case's own inputs before it is timed; rounds
interleave them. Eager: triton.testing.do_bench, median, L2 cleared, launches included. Graph: 32
calls on 32 distinct caches in one captured graph, planner included, divided by 32. One JSON line a
figure goes to --out; tables are printed."""

import argparse
import importlib.util
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from triton.testing import do_bench

from experiments.kernels.cases import (
    DECODE,
    GRAPH,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PREFILL,
    SCALE,
    Case,
    Inputs,
    graph_us,
    make,
)
from kernels import extend_dense
from kernels.split_kv import SplitKV

Call = Callable[[], Any]
LAYERS = 32
TOLERANCE = 1e-2  # relative 2-norm error of a bfloat16 result


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

    def line(self, kind: str) -> dict[str, Any]:
        """For the log."""
        facts: dict[str, Any] = {"kind": kind, "case": self.case.name, "name": self.name}
        if self.failure is not None:
            return facts | {"failure": self.failure}
        facts |= {"us": round(self.us, 2), "rounds_us": [round(t, 2) for t in self.rounds_us]}
        facts |= {"tb_s": self.case.kv_bytes / self.us / 1e6}
        return facts | {"tflops": self.case.flops / self.us / 1e6, "rel_error": self.error}


def main() -> None:
    """Run the tables that the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench.jsonl"))
    parser.add_argument("--tables", default="decode,prefill,graph")
    arguments = parser.parse_args()
    peers = _load_peers(arguments.peers)
    log = arguments.out.open("w")
    _write(log, {"kind": "device", **_ceilings()})
    tables = arguments.tables.split(",")
    for kind, cases in (("decode", DECODE), ("prefill", PREFILL)):
        if kind in tables:
            print(f"\n{kind}: microseconds, median of {arguments.rounds} rounds", flush=True)
            for case in cases:
                results = _compare(case, peers, arguments.rounds)
                for result in results:
                    _write(log, result.line(kind))
                print(_row(case, results), flush=True)
    if "graph" in tables:
        print("\ngraph: microseconds a layer", flush=True)
        for case in GRAPH:
            us = _in_graph(case)
            torch.cuda.empty_cache()
            _write(log, {"kind": "graph", "case": case.name, "us": round(us, 2)})
            print(f"{case.name:18} {us:8.2f}  {case.kv_bytes / us / 1e6:.2f} TB/s", flush=True)


def ours(inputs: Inputs) -> Call:
    """Decode rows by SplitKV, longer ones by the extend kernel, as the engine calls them."""
    case = inputs.case
    rows = range(len(case.new))
    decode_rows = [row for row in rows if case.new[row] == 1]
    others = [row for row in rows if case.new[row] > 1]
    caches, kernel = (inputs.k_cache, inputs.v_cache), SplitKV()
    calls: list[Call] = []
    if decode_rows:
        first = decode_rows[0]  # the rest follow in these cases
        q = inputs.q[int(inputs.query_starts[first]) :]
        part = inputs.rows(first, len(case.new))
        plan = kernel.plan(part)
        table, lens = part.page_table, part.context_lens
        calls.append(lambda: kernel(q, *caches, table, lens, SCALE, plan=plan))
    if others:
        part_e = inputs.rows(0, others[-1] + 1)
        q_e = inputs.q[: int(inputs.query_starts[others[-1] + 1])]
        plan_e = extend_dense.plan_extend(part_e)
        starts = part_e.query_starts
        calls.append(
            lambda: extend_dense.extend(
                q_e, *caches, part_e.page_table, part_e.context_lens, starts, SCALE, plan=plan_e
            )
        )

    def call() -> Tensor:
        outs = [each() for each in reversed(calls)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    return call


def torch_cudnn(inputs: Inputs) -> Call:
    """torch's scaled_dot_product_attention over contiguous K and V; rows of one length alone."""
    case = inputs.case
    if len(set(case.context)) > 1 or len(set(case.new)) > 1:
        raise ValueError("rows differ in length")
    new, total = case.new[0], case.context[0]
    if new not in (1, total):
        raise ValueError("its causal mask is not aligned to the end")
    pages = inputs.tables[0][:, : -(-total // case.page_size)].long()
    count = len(case.new)
    shape = (count, -1, KV_HEADS, HEAD_DIM)
    k, v = (
        cache[pages].view(shape)[:, :total].transpose(1, 2).contiguous()
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    q = inputs.q.view(count, new, HEADS, HEAD_DIM).transpose(1, 2).contiguous()

    def call() -> Tensor:
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, HEADS, HEAD_DIM)

    return call


def _compare(case: Case, peers: dict[str, Any], rounds: int) -> list[Result]:
    inputs = make(case)
    results, calls = [], []
    for name, build in _implementations(inputs, peers).items():
        result = Result(case, name)
        results.append(result)
        try:
            call, out = build()
            returned = call()
            out = returned if out is None else out
            sample = sorted(
                {0, 1, len(case.new) // 2, len(case.new) - 1} & set(range(len(case.new)))
            )
            result.error = inputs.error(out, sample)
            if not result.error < TOLERANCE:
                raise ValueError(f"relative error {result.error:.3g}")
            calls.append((result, call))
        except Exception as error:  # one kernel must not cost the others
            result.failure = f"{type(error).__name__}: {str(error)[:200]}"
    for _ in range(rounds):
        for result, call in calls:
            ms = do_bench(call, warmup=10, rep=60, return_mode="median")
            result.rounds_us.append(ms * 1e3)
    del inputs, calls
    torch.cuda.empty_cache()
    return results


def _implementations(inputs: Inputs, peers: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    case = inputs.case
    made: dict[str, Callable[[], Any]] = {
        "tritium": lambda: (ours(inputs), None),
        "torch cuDNN": lambda: (torch_cudnn(inputs), None),
    }
    pages = [-(-total // case.page_size) for total in case.context]
    ids = torch.cat([inputs.tables[0][row, :count] for row, count in enumerate(pages)])
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.tables[0])
    x = (*tensors, inputs.query_starts, inputs.context_lens, ids, pages)
    for name, build in peers.items():
        made[name] = lambda build=build: build(
            x, list(case.new), list(case.context), case.page_size
        )
    return made


def _in_graph(case: Case) -> float:
    inputs = make(case, LAYERS)
    kernel, lens = SplitKV(), inputs.context_lens

    def layers() -> None:
        plan = kernel.plan(inputs.rows(0, len(case.new)))
        for table in inputs.tables:
            kernel(inputs.q, inputs.k_cache, inputs.v_cache, table, lens, SCALE, plan=plan)

    return graph_us(layers) / LAYERS


def _row(case: Case, results: list[Result]) -> str:
    timed = [result for result in results if result.failure is None]
    unit = (
        (lambda us: f"{case.kv_bytes / us / 1e6:.2f}TB/s")
        if case.is_decode
        else (lambda us: f"{case.flops / us / 1e6:.0f}TF")
    )
    cells = [f"{result.name} {result.us:.1f} ({unit(result.us)})" for result in timed]
    cells += [f"{r.name} -" for r in results if r.failure is not None]
    rivals = [r for r in timed if r.name in ("fa3", "flashinfer")]
    if rivals and timed[0].name == "tritium":
        pairs = [
            mine / min(r.rounds_us[i] for r in rivals) for i, mine in enumerate(timed[0].rounds_us)
        ]
        cells.append(f"ratio {statistics.median(pairs):.3f} [{min(pairs):.3f}, {max(pairs):.3f}]")
    return f"{case.name:18} " + "  ".join(cells)


def _ceilings() -> dict[str, Any]:
    """Copy and read bandwidth and the bf16 matrix product, measured now."""
    source = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mm_ms = do_bench(lambda: a @ b, return_mode="median")
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    clocks = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    facts = {
        "device": torch.cuda.get_device_name(),
        "clocks": clocks,
        "copy_tb_s": round(2 * source.nbytes / copy_ms / 1e9, 3),
        "matmul_tflops": round(2 * 8192**3 / mm_ms / 1e9, 1),
        "torch": torch.__version__,
    }
    print(facts, flush=True)
    return facts


def _load_peers(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    spec = importlib.util.spec_from_file_location("peer_kernels", path)
    assert spec is not None, f"{path} is a Python file"
    assert spec.loader is not None, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    implementations: dict[str, Any] = module.IMPL
    return implementations


def _write(log: Any, line: dict[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


if __name__ == "__main__":
    main()
