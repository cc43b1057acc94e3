"""Block-table updates and a step's tables against plain loops."""

import numpy as np
import pytest
import torch

from kernels import page_table
from kernels.page_table import step_tables, update_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(values, dtype=torch.int64):
    return torch.tensor(np.array(values), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("block", [4, 1024])
@pytest.mark.parametrize(("resets", "count"), [(0, 0), (0, 7), (2, 0), (3, 1), (2, 40), (6, 40)])
def test_updates_land_on_cleared_rows(monkeypatch, block, resets, count):
    monkeypatch.setattr(page_table, "BLOCK", page_table.tl.constexpr(block))
    random = np.random.default_rng(resets + count)
    table = random.integers(1, 99, (6, 11)).astype(np.int32)
    rows = random.permutation(6)[:resets]
    places = random.permutation(66)[:count]
    updates = np.stack((places // 11, places % 11, random.integers(1, 99, count)), 1)
    got = on_device(table, torch.int32)
    update_table(got, on_device(rows), on_device(updates.reshape(-1, 3)))
    table[rows] = 0
    for row, index, page in updates:
        table[row, index] = page
    assert got.tolist() == table.tolist()


@pytest.mark.parametrize("block", [4, 1024])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1, 1], [1, 1, 5, 9]])
def test_step_tables_follow_the_table(monkeypatch, block, page_size, query_lens):
    monkeypatch.setattr(page_table, "BLOCK", page_table.tl.constexpr(block))
    random = np.random.default_rng(len(query_lens) + page_size)
    table = random.integers(1, 2**31 - 1, (6, 10 * 16 // page_size)).astype(np.int32)
    rows = random.permutation(6)[: len(query_lens)]
    lens = np.array([random.integers(count, 160) for count in query_lens])
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    token_rows = rows.repeat(query_lens)
    positions = np.concatenate(
        [np.arange(end - count, end) for end, count in zip(lens, query_lens, strict=True)]
    )
    inputs = [on_device(one) for one in (rows, lens, starts, token_rows, positions)]
    made = step_tables(on_device(table, torch.int32), *inputs, page_size)
    assert made.page_table.tolist() == table[rows].tolist()
    assert made.context_lens.tolist() == lens.tolist()
    assert made.query_starts.tolist() == starts.tolist()
    pages = table[token_rows, positions // page_size].astype(np.int64)
    assert made.slots.tolist() == (pages * page_size + positions % page_size).tolist()
    kinds = [made.page_table, made.context_lens, made.query_starts]
    assert {one.dtype for one in kinds} == {torch.int32}


def test_rows_of_a_view_are_cleared_alone():
    whole = torch.full((4, 8), 7, dtype=torch.int32, device=DEVICE)
    update_table(whole[:, :5], on_device([2]), on_device(np.array([[2, 1, 9]])))
    expected = torch.full((4, 8), 7, dtype=torch.int32)
    expected[2, :5] = torch.tensor([0, 9, 0, 0, 0])
    assert torch.equal(whole.cpu(), expected)


@pytest.mark.parametrize(
    ("table", "updates", "message"),
    [
        (torch.int64, torch.zeros(1, 3, dtype=torch.int64), "table dtype must be int32"),
        (torch.int32, torch.zeros(1, 2, dtype=torch.int64), r"updates must be \[n, 3\]"),
        (torch.int32, torch.zeros(1, 3, dtype=torch.int32), "updates dtype must be int64"),
    ],
)
def test_bad_input_is_refused(table, updates, message):
    with pytest.raises(ValueError, match=message):
        update_table(
            torch.zeros(2, 2, dtype=table, device=DEVICE), on_device([0]), updates.to(DEVICE)
        )


@pytest.mark.parametrize("page_size", [0, -16, 12])
def test_page_size_that_is_no_power_of_two_is_refused(page_size):
    one, table = on_device([0]), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=f"page_size must be a power of two, got {page_size}"):
        step_tables(table, one, one, on_device([0, 1]), one, one, page_size)


@pytest.mark.parametrize("place", range(5))
def test_strided_columns_are_refused(place):
    table = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    columns = [on_device([0, 1]), on_device([1, 1]), on_device([0, 1, 2])]
    columns += [on_device([0, 1]), on_device([0, 0])]
    step_tables(table, *columns, 16)
    columns[place] = columns[place].repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match="strides must be contiguous"):
        step_tables(table, *columns, 16)


def test_table_without_columns_is_refused():
    one, table = on_device([0]), torch.zeros(1, 0, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="table columns must be >= 1, got 0"):
        step_tables(table, one, one, on_device([0, 1]), one, one, 16)


@pytest.mark.parametrize("block", [4, 1024])
def test_rows_may_be_more_than_tokens(monkeypatch, block):
    """Rows without tokens: the padding of a launch that a graph captures."""
    monkeypatch.setattr(page_table, "BLOCK", page_table.tl.constexpr(block))
    table = np.arange(18, dtype=np.int32).reshape(9, 2)
    rows, lens, starts = np.arange(8) + 1, np.arange(8), np.arange(9) + 50
    inputs = [on_device(one) for one in (rows, lens, starts, np.array([3]), np.array([17]))]
    made = step_tables(on_device(table, torch.int32), *inputs, 16)
    assert made.page_table.tolist() == table[rows].tolist()
    assert made.context_lens.tolist() == lens.tolist()
    assert made.query_starts.tolist() == starts.tolist()
    assert made.slots.tolist() == [table[3, 1] * 16 + 1]
