"""Measures decode configurations on this card and writes them to kernels/pinned.json.

    python -m experiments.kernels.tune [--head-dims 64,128] [--dtypes bfloat16] [--pages 1,16]
                                       [--groups 1,4,8]

For every shape each candidate is checked against the torch reference, then timed (do_bench, median,
L2 cleared) on a single long row, a small and a large batch; the least geometric mean of its times
over the best ones wins. Candidates compile in processes of their own first, all at once. Entries of
other devices and shapes are kept."""

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor
from triton.testing import do_bench

from experiments.kernels.cases import K
from kernels.pinned import TABLE, Shape
from kernels.split_kv import SplitKV
from kernels.split_launch import DecodeConfig
from kernels.torch_reference import paged_decode

KV_HEADS = 8
BATCHES = ((32 * K,), (4 * K,) * 16, (2 * K,) * 128)
CANDIDATES = tuple(
    DecodeConfig(*one)
    for one in (
        (64, 2, 4, 2),
        (64, 4, 4, 2),
        (64, 2, 3, 3),
        (64, 4, 3, 3),
        (32, 2, 4, 2),
        (32, 2, 6, 2),
        (32, 4, 4, 3),
        (128, 4, 3, 2),
        (128, 4, 4, 2),
        (128, 8, 3, 1),
    )
)
COMPILE_S = 300.0


def main() -> None:
    """Tune the shapes that the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", default="64,80,96,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float8_e4m3fn,float32")
    parser.add_argument("--pages", default="1,16")
    parser.add_argument("--groups", default="1,4,8")
    parser.add_argument("--compile-only", help="a shape as JSON: run each candidate once and stop")
    arguments = parser.parse_args()
    if arguments.compile_only:
        for _ in _timed(Shape(**json.loads(arguments.compile_only)), compile_only=True):
            pass
        return
    lists = (arguments.head_dims, arguments.dtypes, arguments.pages, arguments.groups)
    dims, dtypes, pages, groups = (text.split(",") for text in lists)
    shapes = [
        Shape(int(dim), dtype, int(page), int(group))
        for dim, dtype, page, group in itertools.product(dims, dtypes, pages, groups)
    ]
    _compile(shapes)
    entries = [_entry(shape) for shape in shapes]
    _write([entry for entry in entries if entry is not None])


def _compile(shapes: Iterable[Shape]) -> None:
    """Fill Triton's cache, a process for each shape."""
    command = [sys.executable, "-m", "experiments.kernels.tune", "--compile-only"]
    running = [subprocess.Popen([*command, json.dumps(asdict(shape))]) for shape in shapes]
    for process in running:
        try:
            process.wait(COMPILE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _entry(shape: Shape) -> dict[str, object] | None:
    """The best candidate of a shape, or None if none serves it."""
    times = dict(_timed(shape))
    if not times:
        print(f"{shape}: no candidate serves it", flush=True)
        return None
    best = [min(column) for column in zip(*times.values(), strict=True)]

    def score(config: DecodeConfig) -> float:
        ratios = [us / least for us, least in zip(times[config], best, strict=True)]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    winner = min(times, key=score)
    us = [round(one, 1) for one in times[winner]]
    print(f"{shape}: {winner} {us} us, {score(winner):.3f} of the best of each", flush=True)
    return {
        "kernel": "split_kv",
        "device": torch.cuda.get_device_name(),
        "shape": asdict(shape),
        "configuration": asdict(winner),
        "measured_us": us,
    }


def _timed(shape: Shape, compile_only: bool = False) -> Iterator[tuple[DecodeConfig, list[float]]]:
    """Candidates that serve the shape, with microseconds for each batch."""
    batches = [_inputs(shape, lens) for lens in BATCHES]
    scale = shape.head_dim**-0.5
    for config in CANDIDATES:
        kernel = SplitKV(config=config)
        times = []
        try:
            for tensors in batches:
                plan = None
                out = kernel(*tensors, scale)
                if compile_only:
                    torch.cuda.synchronize()
                    continue
                _check(out, tensors, scale)
                plan = kernel.plan(_rows(tensors, shape))
                call = _call(kernel, tensors, scale, plan)
                times.append(1e3 * do_bench(call, warmup=5, rep=25, return_mode="median"))
        except Exception as error:  # most often: shared memory or registers do not suffice
            print(f"{shape}: {config} left out: {str(error)[:100]}", flush=True)
            continue
        yield config, times


def _call(kernel, tensors, scale, plan):  # noqa: ANN001, ANN202
    return lambda: kernel(*tensors, scale, plan=plan)


def _rows(tensors, shape):  # noqa: ANN001, ANN202
    from kernels.declare import Rows

    q, _, _, table, lens = tensors
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda")
    host = [0] * len(lens)
    return Rows(
        table, lens, starts, host, [1] * len(lens), shape.page_size, q.shape[1], KV_HEADS,
        shape.head_dim,
    )  # fmt: skip


def _check(out: Tensor, tensors: tuple[Tensor, ...], scale: float) -> None:
    q, k_cache, v_cache, table, lens = (
        tensor[:1] if i in (0, 3, 4) else tensor for i, tensor in enumerate(tensors)
    )
    expected = paged_decode(q.float(), k_cache.float(), v_cache.float(), table, lens, scale)
    error = float((out[:1].float() - expected).norm() / expected.norm())
    if not error < 2e-2:
        raise ValueError(f"relative error {error:.3g}")


def _inputs(shape: Shape, lens: tuple[int, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    pages = [-(-length // shape.page_size) for length in lens]
    dims = (sum(pages) + 1, shape.page_size, KV_HEADS, shape.head_dim)
    cache_dtype = getattr(torch, shape.dtype)
    q_dtype = torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype
    k_cache, v_cache = (
        torch.randn(dims, device="cuda", dtype=q_dtype).to(cache_dtype) for _ in range(2)
    )
    free = torch.randperm(sum(pages), device="cuda", dtype=torch.int32) + 1
    table = free.view(len(lens), pages[0])  # rows of one length
    q = torch.randn(len(lens), KV_HEADS * shape.group, shape.head_dim, device="cuda", dtype=q_dtype)
    return q, k_cache, v_cache, table, torch.tensor(lens, dtype=torch.int32, device="cuda")


def _write(entries: list[dict[str, object]]) -> None:
    """Replace the entries of these shapes on this device, one line each."""
    old = json.loads(TABLE.read_text()) if TABLE.exists() else []
    fields = ("kernel", "device", "shape")
    new = [[entry[name] for name in fields] for entry in entries]
    kept = [entry for entry in old if [entry[name] for name in fields] not in new]
    lines = ",\n".join(json.dumps(entry) for entry in [*kept, *entries])
    TABLE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
