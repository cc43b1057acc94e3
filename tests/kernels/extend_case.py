"""A case of ragged prefill: a poisoned paged cache, a kernel's inputs and the dense answer."""

import torch

from kernels.declare import Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {
    torch.float32: 1e-5,  # one reduction of a few hundred terms
    torch.float16: 2e-3,  # inputs, weights and outputs carry 11 bits of mantissa
    torch.bfloat16: 1.5e-2,  # ... 8 bits
}
LSE_TOLERANCE = 1e-3


def dense(q, k, v, scale, window=None, softcap=None):
    """(out, lse) in float64: q [T, Hq, D] are the last T of the C positions in k, v [C, Hkv, D]."""
    num_queries, context = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,chd->thc", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(context - num_queries, context, device=q.device)[:, None]
    keys = torch.arange(context, device=q.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("thc,chd->thd", weights, v), scores.logsumexp(-1)


class Case:
    """Rows of (context, new tokens) in a NaN-poisoned pool, the inputs of a kernel and the answer.
    A row of context 0 sees nothing; num_padding packed tokens follow the last row. growing: maxima
    of some queries' scores grow by far along the keys, those of others hardly."""

    def __init__(self, rows, heads=(2, 1), head_dim=64, page_size=16, dtype=torch.float16,
                 kv_dtype=None, num_padding=0, window=None, softcap=None, seed=0,
                 growing=False):  # fmt: skip
        random = torch.Generator().manual_seed(seed)
        kv_dtype = kv_dtype or dtype
        self.rows, self.heads, self.page_size = rows, heads, page_size
        contexts, new = [row[0] for row in rows], [row[1] for row in rows]
        num_pages = 1 + sum(-(-context // page_size) for context in contexts)
        table = torch.zeros(len(rows), -(-max(contexts) // page_size) + 2, dtype=torch.int32)
        shape = (num_pages * page_size, heads[1], head_dim)
        caches = [torch.full(shape, torch.nan).to(kv_dtype) for _ in range(2)]
        total = sum(new) + num_padding
        self.q = torch.randn(total, heads[0], head_dim, generator=random).to(dtype)
        if growing:
            self.q[torch.rand(total, heads[0], generator=random) < 0.3] *= 4
        self.kv_new = torch.full((2, total, heads[1], head_dim), torch.nan, dtype=dtype)
        self.expected = torch.zeros(total, heads[0], head_dim, dtype=torch.float64)
        self.lse = torch.full((total, heads[0]), -torch.inf, dtype=torch.float64)
        free = (torch.randperm(num_pages - 1, generator=random) + 1).tolist()
        self.scale, begin = head_dim**-0.5, 0
        for i, (context, length) in enumerate(rows):
            for page in range(-(-context // page_size)):
                table[i, page] = free.pop()
            at = torch.arange(context)
            slots = table[i, at // page_size].long() * page_size + at % page_size
            keys, values = (torch.randn(context, *shape[1:], generator=random) for _ in range(2))
            if growing:
                keys *= torch.linspace(0.1, 3.0, context)[:, None, None]
            keys, values = keys.to(kv_dtype), values.to(kv_dtype)
            part = slice(begin, begin + length)
            begin += length
            if context:
                # Positions that no new token sees any more may belong to others.
                gone = 0 if window is None else max(0, context - length - window + 1)
                for cache, given in zip(caches, (keys, values), strict=True):
                    given = given.clone()
                    given[:gone] = torch.nan
                    # Indexing does not know float8: move the bits.
                    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kv_dtype.itemsize]
                    cache.view(bits)[slots] = given.view(bits)
                k, v = keys.to(dtype), values.to(dtype)
                if length <= context:
                    self.kv_new[0, part], self.kv_new[1, part] = k[-length:], v[-length:]
                answer = dense(self.q[part], k, v, self.scale, window, softcap)
                self.expected[part], self.lse[part] = answer
        self.caches = [cache.view(num_pages, page_size, *shape[1:]).to(DEVICE) for cache in caches]
        self.q, self.kv_new = self.q.to(DEVICE), self.kv_new.to(DEVICE)
        self.table, self.lens, self.starts = (
            x.to(DEVICE, torch.int32)
            for x in (table, torch.tensor(contexts), torch.tensor([0, *new]).cumsum(0))
        )

    def plan_rows(self):
        """The `Rows` that a plan gets."""
        contexts, new = [row[0] for row in self.rows], [row[1] for row in self.rows]
        sizes = self.page_size, *self.heads, self.q.shape[2]
        return Rows(self.table, self.lens, self.starts, contexts, new, *sizes)

    def inputs(self):
        """The positional arguments of a kernel, up to the scale."""
        return self.q, *self.caches, self.table, self.lens, self.starts, self.scale

    def check(self, out, lse=None, tolerance=None):
        """Compare with the dense answer."""
        tolerance = tolerance or TOLERANCE[self.q.dtype]
        out = out.double().cpu()
        torch.testing.assert_close(out, self.expected, atol=tolerance, rtol=tolerance)
        if lse is not None:
            torch.testing.assert_close(lse.double().cpu(), self.lse, atol=LSE_TOLERANCE, rtol=0)
