"""Attention cases of the kernel benchmarks: inputs over a shuffled paged pool, work counts, timing.

32 query heads, 8 KV heads, head_dim 128, bfloat16, unless said."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.declare import Rows

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
K = 1024


@dataclass(frozen=True)
class Case:
    """new tokens and context (new ones included) of each row."""

    name: str
    new: tuple[int, ...]
    context: tuple[int, ...]
    page_size: int = 16

    @property
    def is_decode(self) -> bool:
        """Every row has one new token."""
        return max(self.new) == 1

    @property
    def kv_bytes(self) -> int:
        """K and V read once, in bfloat16."""
        return 2 * 2 * sum(self.context) * KV_HEADS * HEAD_DIM

    @property
    def bytes(self) -> int:
        """What must move: K, V and the block table read once, q read and the output written."""
        pages = sum(-(-total // self.page_size) for total in self.context)
        return self.kv_bytes + 2 * 2 * sum(self.new) * HEADS * HEAD_DIM + 4 * pages

    @property
    def flops(self) -> float:
        """Two products over the keys that each query sees."""
        pairs = zip(self.new, self.context, strict=True)
        seen = sum(new * (total - new) + new * (new + 1) / 2 for new, total in pairs)
        return 4 * HEADS * HEAD_DIM * seen


def decode(name: str, context: Sequence[int], page_size: int = 16) -> Case:
    """A case of one new token a row."""
    return Case(name, (1,) * len(context), tuple(context), page_size)


DECODE = (
    decode("1x1k", [K]),
    decode("1x4k", [4 * K]),
    decode("1x32k", [32 * K]),
    decode("16x8k", [8 * K] * 16),
    decode("8x32k", [32 * K] * 8),
    decode("32x4k", [4 * K] * 32),
    decode("64x8k", [8 * K] * 64),
    decode("256x1k", [K] * 256),
    decode("256x2k", [2 * K] * 256),
    decode("1x128k + 63x1k", [128 * K, *[K] * 63]),
    decode("64x8k, page 1", [8 * K] * 64, 1),
    decode("32x4k, page 1", [4 * K] * 32, 1),
)
MIXED = Case("256 + 4k, 63 x 2k", (256, *[1] * 63), (4 * K, *[2 * K] * 63))
GRAPH = (
    decode("1x1k", [K]),
    decode("1x4k", [4 * K]),
    decode("1x32k", [32 * K]),
    decode("8x1k", [K] * 8),
    decode("32x4k", [4 * K] * 32),
    decode("256x1k", [K] * 256),
    decode("256x384", [384] * 256),
    MIXED,
)
PREFILL = (
    Case("2k + 0", (2 * K,), (2 * K,)),
    Case("8k + 0", (8 * K,), (8 * K,)),
    Case("4 x 8k", (8 * K,) * 4, (8 * K,) * 4),
    Case("2k + 6k", (2 * K,), (8 * K,)),
    Case("2k + 30k", (2 * K,), (32 * K,)),
    Case("8k, page 1", (8 * K,), (8 * K,), 1),
    MIXED,
)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Random inputs of a case on the GPU; caches[i] for layer i, under one block table."""

    case: Case
    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    table: Tensor
    context_lens: Tensor
    query_starts: Tensor

    def rows(self, begin: int, end: int) -> Rows:
        """Rows begin .. end, as a kernel's plan sees them."""
        starts = self.query_starts[begin : end + 1]
        return Rows(
            self.table[begin:end],
            self.context_lens[begin:end],
            starts - starts[0],
            list(self.case.context[begin:end]),
            list(self.case.new[begin:end]),
            self.case.page_size,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
        )

    def contiguous(self, row: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """K and V [context, KV_HEADS, HEAD_DIM] of one row, in order."""
        total = self.case.context[row]
        pages = self.table[row, : -(-total // self.case.page_size)].long()
        k, v = (cache[pages].flatten(0, 1)[:total] for cache in self.caches[layer])
        return k, v

    def new_kv(self, begin: int, end: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """K and V [their new tokens, KV_HEADS, HEAD_DIM] of rows begin .. end, packed."""
        pairs = [
            [one[-self.case.new[row] :] for one in self.contiguous(row, layer)]
            for row in range(begin, end)
        ]
        k, v = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return k, v

    def reference(self, row: int) -> Tensor:
        """float32 [new, HEADS, HEAD_DIM] of one row, its last 16 tokens at most."""
        begin, end = self.query_starts[row : row + 2].tolist()
        begin = max(begin, end - 16)
        total = self.case.context[row]
        group = HEADS // KV_HEADS
        k, v = (one.float().repeat_interleave(group, 1) for one in self.contiguous(row))
        scores = torch.einsum("qhd,khd->hqk", self.q[begin:end].float(), k) * SCALE
        count = end - begin
        position = torch.arange(total - count, total, device=scores.device)
        hidden = torch.arange(total, device=scores.device) > position[:, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def error(self, out: Tensor, rows: Sequence[int]) -> float:
        """Largest relative error (2-norm) of some rows' last tokens."""
        errors = []
        for row in rows:
            expected = self.reference(row)
            end = int(self.query_starts[row + 1])
            got = out[end - len(expected) : end].float()
            errors.append(float((got - expected).norm() / expected.norm()))
        return max(errors)


def make(case: Case, layers: int = 1, seed: int = 0, device: str = "cuda") -> Inputs:
    """Unit-normal inputs, pages shuffled, tails of the table on page 0."""
    torch.manual_seed(seed)
    pages = [-(-total // case.page_size) for total in case.context]
    shape = (sum(pages) + 1, case.page_size, KV_HEADS, HEAD_DIM)
    options = {"device": device, "dtype": torch.bfloat16}
    caches = [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(layers)]
    free = torch.randperm(sum(pages), device=device, dtype=torch.int32) + 1
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    begin = 0
    for row, count in enumerate(pages):
        table[row, :count] = free[begin : begin + count]
        begin += count
    starts = torch.tensor([0, *case.new], device=device).cumsum(0).int()
    lens = torch.tensor(case.context, dtype=torch.int32, device=device)
    q = torch.randn(sum(case.new), HEADS, HEAD_DIM, **options)
    return Inputs(case, q, caches, table, lens, starts)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which has run once before."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 7) -> float:
    """Median microseconds of a replay."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[2:])[repeats // 2]


def graph_us(run: Callable[[], object], repeats: int = 7, calls: int = 1) -> float:
    """Median microseconds of `run`, of `calls` of them in one captured graph."""

    def all_calls() -> None:
        for _ in range(calls):
            run()

    return replay_us(capture(all_calls), repeats) / calls
