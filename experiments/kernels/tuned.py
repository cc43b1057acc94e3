"""What tune.py measures: for each kernel its shapes, candidates and workloads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from experiments.kernels.cases import K, capture, graph_us
from kernels.compiled import record
from kernels.declare import Rows
from kernels.pinned import Shape
from kernels.rotary_store import (
    FEW,
    FEW_TOKENS,
    MANY,
    RotaryStoreConfig,
    StoreTarget,
    rotary_store,
)
from kernels.split_kv import SplitKV
from kernels.split_launch import DecodeConfig
from kernels.torch_reference import paged_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS = 8
GRAPH_CALLS = 32


@dataclass(frozen=True)
class Workload:
    """Inputs of one batch. run(config): launch and return what `check` compares; us(config): time
    it, microseconds."""

    run: Callable[[Any], Any]
    check: Callable[[Any], None]
    us: Callable[[Any], float]


@dataclass(frozen=True)
class Tuned:
    """A kernel. shapes: the ones that matter most first. candidates(shape): dataclasses of launch
    parameters. workloads(shape, small): small ones compile the same kernels, and no more."""

    shapes: tuple[Shape, ...]
    candidates: Callable[[Shape], Sequence[Any]]
    workloads: Callable[[Shape, bool], list[Workload]]


def cold_us(call: Callable[[], Any]) -> float:
    """Median with a cold L2, captured: without the host's part of a launch."""
    graph = capture(call)
    return 1e3 * float(do_bench(graph.replay, warmup=3, rep=12, return_mode="median"))


DECODE_ROWS = ((1, 32 * K), (32, 4 * K), (64, 8 * K), (256, K), (256, 2 * K))
"""Rows and their context: a long one, a small batch, and large ones, where most time is spent."""

DECODE_SHAPES = tuple(
    Shape(*one)
    for one in (
        (128, "bfloat16", 16, 4),
        (128, "bfloat16", 16, 2),
        (64, "bfloat16", 16, 3),
        (128, "float8_e4m3fn", 16, 4),
        (128, "bfloat16", 1, 4),
        (128, "bfloat16", 16, 8),
        (128, "bfloat16", 16, 1),
        (64, "bfloat16", 16, 8),
        (256, "bfloat16", 16, 4),
        (128, "bfloat16", 16, 7),
        (64, "bfloat16", 16, 1),
        (96, "bfloat16", 16, 1),
        (80, "bfloat16", 16, 1),
        (64, "bfloat16", 1, 3),
        (128, "float8_e4m3fn", 1, 4),
        (256, "bfloat16", 1, 4),
        (64, "float8_e4m3fn", 16, 3),
        (256, "float8_e4m3fn", 16, 4),
        (128, "float32", 16, 4),
        (64, "float32", 16, 3),
    )
)


def decode_candidates(shape: Shape) -> tuple[DecodeConfig, ...]:
    """block_n, warps, stages, programs to a multiprocessor: tiles of about the same bytes."""
    row_bytes = triton.next_power_of_2(shape.head_dim) * getattr(torch, shape.dtype).itemsize
    if row_bytes <= 128:
        made = ((64, 2, 4, 2), (64, 2, 6, 2), (64, 4, 4, 3), (64, 2, 4, 4), (128, 4, 3, 2))
        made = (*made, (128, 4, 4, 2), (128, 2, 3, 2), (128, 4, 3, 3))
    elif row_bytes <= 256:
        made = ((64, 2, 4, 2), (64, 4, 4, 2), (64, 4, 3, 2), (64, 2, 3, 3), (64, 4, 3, 3))
        made = (*made, (32, 2, 6, 2), (32, 4, 4, 3), (128, 4, 3, 1))
    else:
        made = ((32, 4, 4, 2), (32, 2, 4, 2), (32, 4, 3, 2), (64, 4, 3, 1), (16, 4, 3, 3))
        made = (*made, (16, 4, 3, 2), (16, 4, 2, 1))
    return tuple(DecodeConfig(*one) for one in made)


def decode_workloads(shape: Shape, small: bool) -> list[Workload]:
    """A batch for each of DECODE_ROWS."""
    torch.manual_seed(0)
    return [_decode(shape, rows, 16 * shape.page_size if small else n) for rows, n in DECODE_ROWS]


def _decode(shape: Shape, rows: int, context: int) -> Workload:
    pages = -(-context // shape.page_size)
    cache_dtype = getattr(torch, shape.dtype)
    q_dtype = torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype
    options: dict[str, Any] = {"device": DEVICE, "dtype": q_dtype}
    dims = (rows * pages + 1, shape.page_size, KV_HEADS, shape.head_dim)
    k_cache, v_cache = (torch.randn(dims, **options).to(cache_dtype) for _ in range(2))
    free = torch.randperm(rows * pages, device=DEVICE, dtype=torch.int32) + 1
    q = torch.randn(rows, KV_HEADS * shape.group, shape.head_dim, **options)
    lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
    tensors = (q, k_cache, v_cache, free.view(rows, pages), lens)
    scale = shape.head_dim**-0.5
    expected = paged_decode(*(x.float() for x in tensors[:3]), *tensors[3:], scale)

    def run(config: DecodeConfig) -> Any:
        return SplitKV(config=config)(*tensors, scale)

    def check(config: DecodeConfig) -> None:
        _check_error(run(config), expected)

    def us(config: DecodeConfig) -> float:
        kernel = SplitKV(config=config)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
        sizes = (shape.page_size, q.shape[1], KV_HEADS, shape.head_dim)
        plan = kernel.plan(Rows(tensors[3], lens, starts, [context] * rows, [1] * rows, *sizes))
        return cold_us(lambda: kernel(*tensors, scale, plan=plan))

    return Workload(run, check, us)


def too_many(config: Any, workload: Workload, capability: int) -> str | None:
    """Why a configuration cannot have as many programs to a multiprocessor as it counts on, by the
    compiled kernel, or None. capability: 80, 89, 90, ..."""
    if not isinstance(config, DecodeConfig):
        return None
    with record(capability) as compiled:
        workload.run(config)
    [held] = {kernel.programs for kernel in compiled if kernel.kernel == "decode_kernel"}
    return None if held >= config.per_sm else f"a multiprocessor holds {held} of its programs"


ROTARY_SHAPES = tuple(
    Shape(*one)
    for one in (
        (128, "bfloat16", 1, 4),
        (128, "bfloat16", 1, 2),
        (64, "bfloat16", 1, 3),
        (128, "float8_e4m3fn", 1, 4),
        (128, "bfloat16", 1, 1),
        (256, "bfloat16", 1, 4),
        (64, "float8_e4m3fn", 1, 3),
        (128, "float32", 1, 4),
    )
)


def rotary_candidates(shape: Shape) -> tuple[RotaryStoreConfig, ...]:
    """Tiles of 256 to 2,048 pairs, 4 or 8 pairs to a thread."""
    block_half = triton.next_power_of_2(shape.head_dim // 2)
    heads = triton.next_power_of_2((shape.group + 2) * KV_HEADS)
    pairs = [(size, threads) for size in (256, 512, 1024, 2048) for threads in (4, 8)]
    made = {(size // block_half, size // each // 32) for size, each in pairs}
    fitting = sorted(one for one in made if 1 <= one[0] <= heads and 1 <= one[1] <= 16)
    return tuple(RotaryStoreConfig(*one) for one in fitting)


def rotary_workloads(shape: Shape, small: bool, tokens: tuple[int, ...]) -> list[Workload]:
    """A batch for each of `tokens`; few are timed in a graph, as a decode step launches them."""
    torch.manual_seed(0)
    return [_rotary(shape, 4 if small else count, count <= FEW_TOKENS) for count in tokens]


def _rotary(shape: Shape, tokens: int, in_graph: bool) -> Workload:
    cache_dtype = getattr(torch, shape.dtype)
    dtype = torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype
    num_q, half = shape.group * KV_HEADS, shape.head_dim // 2
    heads = num_q + 2 * KV_HEADS
    qkv = torch.randn(tokens, heads, shape.head_dim, device=DEVICE, dtype=dtype)
    angles = torch.randn(tokens, half, device=DEVICE) * 10
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.randperm(2 * tokens, device=DEVICE)[:tokens]
    dims = (2 * tokens, KV_HEADS, shape.head_dim)
    caches = [torch.zeros(dims, device=DEVICE, dtype=cache_dtype) for _ in range(2)]
    target = StoreTarget(*caches, slots)
    x = qkv[:, : num_q + KV_HEADS].float()
    a, b, c, s = x[..., :half], x[..., half:], cos.float()[:, None], sin.float()[:, None]
    turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    before = qkv.clone()

    def run(config: RotaryStoreConfig, given: Tensor = qkv) -> Tensor:
        rotary_store(given, num_q, target, cos, sin, config=config)
        return given

    def check(config: RotaryStoreConfig) -> None:
        for cache in caches:
            cache.zero_()
        out = run(config, before.clone())
        _check_error(out[:, : num_q + KV_HEADS], turned)
        _check_error(caches[0][slots], turned[:, num_q:], 5e-2)
        _check_error(caches[1][slots], before[:, num_q + KV_HEADS :], 5e-2)

    def us(config: RotaryStoreConfig) -> float:
        call = partial(run, config)
        return graph_us(call, calls=GRAPH_CALLS) if in_graph else cold_us(call)

    return Workload(run, check, us)


def _check_error(out: Tensor, expected: Tensor, tolerance: float = 2e-2) -> None:
    error = float((out.float() - expected.float()).norm() / expected.float().norm())
    if not error < tolerance:  # a NaN is not
        raise ValueError(f"relative error {error:.3g}")


TUNED = {
    "split_kv": Tuned(DECODE_SHAPES, decode_candidates, decode_workloads),
    MANY: Tuned(ROTARY_SHAPES, rotary_candidates, partial(rotary_workloads, tokens=(8 * K, 2 * K))),
    FEW: Tuned(
        ROTARY_SHAPES, rotary_candidates, partial(rotary_workloads, tokens=(1, 16, 128, 256))
    ),
}


def score(us: Sequence[float], best: Sequence[float]) -> float:
    """Geometric mean of the times over the best ones."""
    ratios = [one / least for one, least in zip(us, best, strict=True)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
