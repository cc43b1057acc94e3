"""Kernels as a graph of a mixed launch calls them: decode over more rows than there are, then
extend over what it wrote, with rows that have no tokens."""

import pytest
import torch

from kernels.extend_dense import extend
from kernels.shared_prefix import SharedPrefix
from kernels.split_kv import SplitKV
from kernels.torch_reference import paged_extend
from tests.kernels.extend_case import DEVICE

PAGE, HEADS, HEAD_DIM = 16, (4, 2), 64
PREFIX = 128  # tokens that the first rows share
ROOM, EMPTY = 8, 2  # one-token rows, and longer rows without tokens


def pool(ones, chunks, num_tokens):
    """Caches that are NaN but for the rows' own slots and page 0's first, and the launch's tables:
    ones: contexts of one-token rows; chunks: (context, new) of the others."""
    random = torch.Generator().manual_seed(5)
    contexts = [*ones, *(context for context, _ in chunks)]
    pages = [-(-context // PAGE) for context in contexts]
    table = torch.zeros(ROOM + len(chunks) + EMPTY, max(pages) + 1, dtype=torch.int32)
    free = (torch.randperm(sum(pages), generator=random) + 1).tolist()
    places = [*range(len(ones)), *range(ROOM, ROOM + len(chunks))]
    for row, count in zip(places, pages, strict=True):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    table[1 : len(ones), : PREFIX // PAGE] = table[0, : PREFIX // PAGE]
    caches = [torch.full(((sum(pages) + 1) * PAGE, HEADS[1], HEAD_DIM), torch.nan) for _ in "kv"]
    for row, context in [*zip(places, contexts, strict=True), (len(ones), 1)]:
        at = torch.arange(context)
        slots = table[row, at // PAGE].long() * PAGE + at % PAGE
        for cache in caches:
            cache[slots] = torch.randn(context, HEADS[1], HEAD_DIM, generator=random)
    new = [count for _, count in chunks]
    starts = torch.tensor([*range(ROOM), *(len(ones) + sum(new[:i]) for i in range(len(new) + 1))])
    starts = torch.cat([starts, starts[-1:].repeat(EMPTY)])
    lens = torch.tensor([*ones, *[1] * (ROOM - len(ones)), *contexts[len(ones) :], *[0] * EMPTY])
    q = torch.randn(num_tokens, HEADS[0], HEAD_DIM, generator=random)
    caches = [cache.view(-1, PAGE, HEADS[1], HEAD_DIM).to(DEVICE) for cache in caches]
    return q.to(DEVICE), caches, *(one.to(DEVICE, torch.int32) for one in (table, lens, starts))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "decode",
    [SplitKV(), SharedPrefix(min_prefix_tokens=16, min_saved_bytes=0)],
    ids=["split_kv", "shared_prefix"],
)
def test_decode_then_extend_give_what_the_rows_alone_would(decode, window):
    ones, chunks = [150, 131, 140], [(40, 9), (5, 5)]
    q, caches, table, lens, starts = pool(ones, chunks, 20)  # three of them padding
    scale, room = HEAD_DIM**-0.5, slice(0, ROOM)
    out = torch.full_like(q, torch.nan)
    decode(q[room], *caches, table[room], lens[room], scale, window, out=out[room])
    rest = table[ROOM:], lens[ROOM:], starts[ROOM:]
    extend.in_graph(q, *caches, *rest, scale, window, out=out)
    there = [*range(len(ones)), *range(ROOM, ROOM + len(chunks))]
    begins = torch.tensor([0, 1, 2, 3, 12, 17], dtype=torch.int32, device=DEVICE)
    rows = table[there], lens[there], begins
    expected = paged_extend(q, *caches, *rows, scale, window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert not out[17:].any()
