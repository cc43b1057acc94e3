"""Paged attention in torch against dense attention written out, over shuffled pages and stale
values."""

import pytest
import torch

from kernels.declare import Rows
from kernels.torch_reference import (
    _decode_groups,
    paged_decode,
    paged_extend,
    plan_decode,
    plan_extend,
)

DTYPES = {
    torch.float32: 2e-6,  # one reduction of up to ~600 terms in fp32
    torch.bfloat16: 2e-2,  # inputs and outputs carry 8 bits of mantissa
}


def dense(q, k, v, scale, window):
    """q [T, Hq, D] are the last T of the C positions in k, v [C, Hkv, D]; float64."""
    num_queries, context = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,chd->htc", q, k) * scale
    queries = torch.arange(context - num_queries, context)[:, None]
    keys = torch.arange(context)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htc,chd->thd", weights, v)


def paged_case(contexts, heads=(6, 2), head_dim=16, page_size=16, dtype=torch.float32, seed=0):
    """A pool full of NaN but for the rows' own tokens, on shuffled pages; table tails point at page
    0."""
    random = torch.Generator().manual_seed(seed)
    max_pages = -(-max(contexts) // page_size) + 1
    num_pages = 1 + sum(-(-context // page_size) for context in contexts)
    shape = (num_pages, page_size, heads[1], head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype)
    v_cache = torch.full(shape, torch.nan, dtype=dtype)
    free = (torch.randperm(num_pages - 1, generator=random) + 1).tolist()
    table = torch.zeros(len(contexts), max_pages, dtype=torch.int32)
    keys, values = [], []
    for row, context in enumerate(contexts):
        k = torch.randn(context, heads[1], head_dim, generator=random).to(dtype)
        v = torch.randn(context, heads[1], head_dim, generator=random).to(dtype)
        for page in range(-(-context // page_size)):
            table[row, page] = free.pop()
        positions = torch.arange(context)
        slots = table[row, positions // page_size].long() * page_size + positions % page_size
        k_cache.view(-1, heads[1], head_dim)[slots] = k
        v_cache.view(-1, heads[1], head_dim)[slots] = v
        keys.append(k)
        values.append(v)
    return k_cache, v_cache, table, keys, values, random


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_decode_equals_dense_attention(page_size, window, heads, dtype):
    contexts = [500, 1, 63, 16, 17, 600, 2]
    case = paged_case(contexts, heads, page_size=page_size, dtype=dtype)
    k_cache, v_cache, table, keys, values, random = case
    q = torch.randn(len(contexts), heads[0], 16, generator=random).to(dtype)
    lens = torch.tensor(contexts, dtype=torch.int32)
    out = paged_decode(q, k_cache, v_cache, table, lens, 0.25, window)
    for row in range(len(contexts)):
        expected = dense(q[row : row + 1], keys[row], values[row], 0.25, window)[0]
        error = (out[row].double() - expected).abs().max().item()
        assert error < DTYPES[dtype], (row, error)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_extend_equals_dense_attention(page_size, window, heads, dtype):
    contexts, queries = [500, 1, 63, 64, 17], [100, 1, 63, 1, 16]
    case = paged_case(contexts, heads, page_size=page_size, dtype=dtype)
    k_cache, v_cache, table, keys, values, random = case
    q = torch.randn(sum(queries), heads[0], 16, generator=random).to(dtype)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    lens = torch.tensor(contexts, dtype=torch.int32)
    out = paged_extend(q, k_cache, v_cache, table, lens, starts, 0.25, window)
    for row in range(len(contexts)):
        part = slice(int(starts[row]), int(starts[row + 1]))
        expected = dense(q[part], keys[row], values[row], 0.25, window)
        error = (out[part].double() - expected).abs().max().item()
        assert error < DTYPES[dtype], (row, error)


def test_plans_are_reused_across_layers_and_windows():
    contexts = [300, 20, 40]
    k_cache, v_cache, table, keys, values, random = paged_case(contexts)
    lens = torch.tensor(contexts, dtype=torch.int32)
    q = torch.randn(3, 6, 16, generator=random)
    starts = torch.arange(4, dtype=torch.int32)
    rows = Rows(table, lens, starts, contexts, [1, 1, 1], 16, 6, 2, 16)
    plan, extend = plan_decode(rows), plan_extend(rows)
    for window in (None, 8, None, 8, 290):
        out = paged_decode(q, k_cache, v_cache, table, lens, 0.25, window, plan=plan)
        same = paged_extend(q, k_cache, v_cache, table, lens, starts, 0.25, window, plan=extend)
        for row in range(3):
            expected = dense(q[row : row + 1], keys[row], values[row], 0.25, window)[0]
            torch.testing.assert_close(out[row].double(), expected, atol=2e-6, rtol=0)
            torch.testing.assert_close(same[row].double(), expected, atol=2e-6, rtol=0)
    assert set(plan.groups) == set(extend.rows) == {None, 8, 290}


def test_slots_beyond_32_bits_are_addressed():
    page_size = 2**20
    table = torch.tensor([[3000, 0]], dtype=torch.int32)
    lens = torch.tensor([5], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    group = plan_decode(Rows(table, lens, starts, [5], [1], page_size, 1, 1, 1))
    slots = _decode_groups(group, None, torch.zeros(1, 1, 1))[0].slots
    assert slots.tolist() == [3000 * 2**20 + i for i in range(5)]
