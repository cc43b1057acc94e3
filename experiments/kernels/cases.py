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
GRAPH = (
    decode("1x1k", [K]),
    decode("1x4k", [4 * K]),
    decode("1x32k", [32 * K]),
    decode("8x1k", [K] * 8),
    decode("32x4k", [4 * K] * 32),
    decode("256x1k", [K] * 256),
    decode("256x384", [384] * 256),
)
PREFILL = (
    Case("2k + 0", (2 * K,), (2 * K,)),
    Case("8k + 0", (8 * K,), (8 * K,)),
    Case("4 x 8k", (8 * K,) * 4, (8 * K,) * 4),
    Case("2k + 6k", (2 * K,), (8 * K,)),
    Case("2k + 30k", (2 * K,), (32 * K,)),
    Case("8k, page 1", (8 * K,), (8 * K,), 1),
    Case("256 + 4k, 63 x 2k", (256, *[1] * 63), (4 * K, *[2 * K] * 63)),
)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Random inputs of a case on the GPU; tables[i] for layer i, over pages of its own."""

    case: Case
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: list[Tensor]
    context_lens: Tensor
    query_starts: Tensor

    def rows(self, begin: int, end: int, layer: int = 0) -> Rows:
        """Rows begin .. end, as a kernel's plan sees them."""
        starts = self.query_starts[begin : end + 1]
        return Rows(
            self.tables[layer][begin:end],
            self.context_lens[begin:end],
            starts - starts[0],
            list(self.case.context[begin:end]),
            list(self.case.new[begin:end]),
            self.case.page_size,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
        )

    def reference(self, row: int) -> Tensor:
        """float32 [new, HEADS, HEAD_DIM] of one row, its last 16 tokens at most."""
        begin, end = self.query_starts[row : row + 2].tolist()
        begin = max(begin, end - 16)
        total = self.case.context[row]
        pages = self.tables[0][row, : -(-total // self.case.page_size)].long()
        group = HEADS // KV_HEADS
        k, v = (
            cache[pages].flatten(0, 1)[:total].float().repeat_interleave(group, 1)
            for cache in (self.k_cache, self.v_cache)
        )
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


def make(case: Case, layers: int = 1, seed: int = 0) -> Inputs:
    """Unit-normal inputs, pages shuffled, tails of the table on page 0."""
    torch.manual_seed(seed)
    device = "cuda"
    pages = [-(-total // case.page_size) for total in case.context]
    per_layer = sum(pages)
    shape = (per_layer * layers + 1, case.page_size, KV_HEADS, HEAD_DIM)
    k_cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
    v_cache = torch.randn_like(k_cache)
    tables = []
    for layer in range(layers):
        free = torch.randperm(per_layer, device=device, dtype=torch.int32) + layer * per_layer + 1
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
        begin = 0
        for row, count in enumerate(pages):
            table[row, :count] = free[begin : begin + count]
            begin += count
        tables.append(table)
    starts = torch.tensor([0, *case.new], device=device).cumsum(0).int()
    lens = torch.tensor(case.context, dtype=torch.int32, device=device)
    q = torch.randn(sum(case.new), HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    return Inputs(case, q, k_cache, v_cache, tables, lens, starts)


def graph_us(run: Callable[[], object], repeats: int = 7) -> float:
    """Median microseconds of a replay of `run`, captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[2:])[repeats // 2]
