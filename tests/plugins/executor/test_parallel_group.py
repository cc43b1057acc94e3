"""Collectives of ranks, which are threads here."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from plugins.executor.parallel_group import connect

CPU = torch.device("cpu")


def together(size, work, in_rank_order=False):
    """What `work(group)` returns on each of `size` ranks."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        ranks = [
            pool.submit(lambda rank=rank: work(connect(store, rank, size, CPU, in_rank_order)))
            for rank in range(size)
        ]
        return [rank.result() for rank in ranks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_gather_and_first_on_every_rank(dtype):
    def work(group):
        x = torch.full((2, 3), 1.0 + group.rank, dtype=dtype)
        parts = group.gather(x)
        total = group.sum(x)
        assert total is x
        first = group.take_first(torch.tensor([10 + group.rank, 20]))
        return parts[:, 0, 0].tolist(), total.tolist(), first.tolist()

    assert together(3, work) == [([1.0, 2.0, 3.0], [[6.0] * 3] * 2, [10, 20])] * 3


def test_nothing_is_exchanged_of_nothing():
    def work(group):
        none = torch.empty(0, 4)
        sizes = group.gather(none).shape, group.sum(none).shape
        return *map(tuple, sizes), len(group.take_first(torch.empty(0, dtype=torch.int64)))

    assert together(2, work) == [((2, 0, 4), (0, 4), 0)] * 2


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_sums_in_rank_order_do_not_depend_on_how_many_rows_there_are(rows):
    """(a + b) + c of numbers whose other sums differ in the last bit, in any batch."""
    parts = torch.randn(3, 64, 50, generator=torch.Generator().manual_seed(1))
    expected = (parts[0] + parts[1]) + parts[2]
    assert not torch.equal(expected, parts[0] + (parts[1] + parts[2]))
    found = together(3, lambda group: group.sum(parts[group.rank, :rows].clone()), True)
    assert all(torch.equal(one, expected[:rows]) for one in found)
