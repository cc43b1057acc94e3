"""What an attention kernel is measured against: paged cases full of traps, dense attention written
out, and the tolerances. Needs torch alone; the tests and the benchmarks share it.

A case's pool is NaN wherever no row has a token: page 0, pages that nobody owns, the ends of last
pages. Table tails point at page 0 or at pages of others. A kernel that reads further than a row's
tokens and lets it reach the result shows at once.

Tolerances: a cap in units of the largest result, at least 1, and for half types the rule of
FlashAttention's tests (arXiv:2407.08608): at most twice the error of the same computation by torch
in the kernel's dtype, both against float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.declare import Rows

CAPS = {
    torch.float32: 1e-5,  # reductions of hundreds of terms in float32, exponentials in base 2
    torch.float16: 2e-3,  # output and weights carry 11 bits
    torch.bfloat16: 1.5e-2,  # 8 bits
}
LSE_CAP = 1e-3
"""Scores come from products of half-precision inputs accumulated in float32."""

RELATIVE = 2.0
SCORES_AT_ONCE = 2**26
"""Elements of the score matrix that the dense reference holds at a time."""


@dataclass(slots=True, eq=False)
class Case:
    """N rows, T packed queries, and what they should attend over.

    q [T, Hq, D]; caches [num_pages, page_size, Hkv, D]; page_table int32 [N, max_pages];
    context_lens int32 [N]; query_starts int32 [N + 1]. contexts, queries: the lengths as integers.
    keys, values: each row's tokens [C, Hkv, D] in the cache's dtype. K is k_scale times the cache,
    V likewise."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    contexts: list[int]
    queries: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_cache.shape[1]

    def rows(self) -> Rows:
        """The rows as a kernel's plan sees them."""
        return Rows(
            page_table=self.page_table,
            context_lens=self.context_lens,
            query_starts=self.query_starts,
            host_context_lens=self.contexts,
            host_query_lens=self.queries,
            page_size=self.page_size,
            num_q_heads=self.q.shape[1],
            num_kv_heads=self.k_cache.shape[2],
            head_dim=self.q.shape[2],
        )

    def slots(self, row: int) -> Tensor:
        """int64 slots of a row's tokens, in order."""
        positions = torch.arange(self.contexts[row], device=self.q.device)
        pages = self.page_table[row, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def part(self, row: int) -> slice:
        """A row's packed queries."""
        begin = sum(self.queries[:row])
        return slice(begin, begin + self.queries[row])

    def alone(self, row: int) -> "Case":
        """The same row in a batch of its own, over the same pool."""
        starts = torch.tensor([0, self.queries[row]], dtype=torch.int32, device=self.q.device)
        return Case(
            q=self.q[self.part(row)].clone(),
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            page_table=self.page_table[row : row + 1].clone(),
            context_lens=self.context_lens[row : row + 1].clone(),
            query_starts=starts,
            contexts=[self.contexts[row]],
            queries=[self.queries[row]],
            keys=[self.keys[row]],
            values=[self.values[row]],
            scale=self.scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest error of an output and how large it may be; NaN counts as infinite."""

    error: float
    limit: float

    @property
    def within(self) -> bool:
        """Whether the output passes."""
        return self.error <= self.limit


def paged_case(
    contexts: Sequence[int],
    queries: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    garbage_tails: bool = False,
    max_pages: int | None = None,
    num_pages: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Unit-normal q, K and V on shuffled pages of a pool of NaN.

    contexts: tokens of each row; queries: how many of the last are new, default 1 each; heads: (Hq,
    Hkv); kv_dtype: of the cache, default q's; scales: (k_scale, v_scale); garbage_tails: tails
    point at pages of others instead of page 0; max_pages, num_pages: widths, default what is needed
    and some to spare."""
    random = torch.Generator(device).manual_seed(seed)
    shuffled = torch.Generator().manual_seed(seed)
    contexts, queries = list(contexts), list(queries or [1] * len(contexts))
    needed = [-(-context // page_size) for context in contexts]
    max_pages = max_pages or max(needed, default=0) + 2
    num_pages = num_pages or 1 + sum(needed) + 3
    shape = (num_pages, page_size, heads[1], head_dim)
    caches = [torch.empty(shape, dtype=kv_dtype or dtype, device=device) for _ in scales]
    for cache in caches:
        fill_nan(cache)
    pages = (torch.randperm(num_pages - 1, generator=shuffled) + 1).int()
    table = torch.zeros(len(contexts), max_pages, dtype=torch.int32)
    if garbage_tails:
        table = pages[torch.randint(num_pages - 1, table.shape, generator=shuffled)]
    taken = 0
    for row, count in enumerate(needed):
        table[row, :count] = pages[taken : taken + count]
        taken += count
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    case = Case(
        torch.randn(sum(queries), heads[0], head_dim, generator=random, device=device).to(dtype),
        *caches,
        table.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        starts.to(device),
        *(contexts, queries, [], []),
        head_dim**-0.5,
        *scales,
    )
    for row, context in enumerate(contexts):
        slots = case.slots(row)
        kept = (case.keys, case.values)
        for cache, scale, rows in zip(caches, scales, kept, strict=True):
            tokens = torch.randn(context, *shape[2:], generator=random, device=device) / scale
            rows.append(tokens.to(cache.dtype))
            store(cache, slots, rows[-1])
    return case


def store(cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Write tokens [n, Hkv, D] into the cache's slots [n]."""
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    tokens = tokens.view(torch.uint8) if cache.element_size() == 1 else tokens
    raw.view(-1, *raw.shape[2:])[slots] = tokens


def fill_nan(tensor: Tensor) -> None:
    """NaN everywhere, also in 8-bit floats."""
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(torch.nan)


def dense_reference(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention over each row's tokens written out in `dtype`: output [T, Hq, D] and natural
    log-sum-exp [T, Hq]. A query that sees nothing has output 0 and log-sum-exp -inf."""
    out = torch.zeros(case.q.shape, dtype=dtype, device=case.q.device)
    lse = torch.full(case.q.shape[:2], -torch.inf, dtype=dtype, device=case.q.device)
    for row, context in enumerate(case.contexts):
        k = case.keys[row].to(dtype) * case.k_scale
        v = case.values[row].to(dtype) * case.v_scale
        part = case.part(row)
        step = max(1, SCORES_AT_ONCE // max(1, context * case.q.shape[1]))
        for begin in range(part.start, part.stop, step):
            end = min(begin + step, part.stop)
            first = context - (part.stop - begin)
            seen = slice(begin + max(0, -first), end)  # a query before position 0 sees nothing
            if seen.start < end:
                rule = (max(first, 0), case.scale, window, softcap)
                out[seen], lse[seen] = _attend(case.q[seen].to(dtype), k, v, *rule)
    return out, lse


def deviation(out: Tensor, expected: Tensor, same_precision: Tensor | None = None) -> Deviation:
    """out against the float64 result. same_precision: torch's result in out's dtype."""
    largest = _largest(expected)
    limit = CAPS[out.dtype] * max(1.0, largest)
    if same_precision is not None and out.dtype != torch.float32 and out.numel():
        rounding = 2 * torch.finfo(out.dtype).eps * largest
        limit = min(limit, RELATIVE * _largest(same_precision.double() - expected) + rounding)
    return Deviation(_largest(out.double() - expected), limit)


def lse_deviation(lse: Tensor, expected: Tensor) -> Deviation:
    """float32 log-sum-exps against the float64 ones; -inf must meet -inf."""
    empty = expected == -torch.inf
    wrong = empty != (lse == -torch.inf)
    difference = torch.where(empty, 0.0, lse.double() - expected)
    return Deviation(torch.inf if wrong.any() else _largest(difference), LSE_CAP)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """q [t, Hq, D] at positions first, first + 1, ... over k, v [C, Hkv, D]."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("thgd,chd->thgc", grouped, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(first, first + len(q), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
    out = torch.einsum("thgc,chd->thgd", scores.softmax(-1), v)
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def _largest(difference: Tensor) -> float:
    if difference.numel() == 0:
        return 0.0
    largest = difference.abs().max().item()
    return torch.inf if largest != largest else largest
