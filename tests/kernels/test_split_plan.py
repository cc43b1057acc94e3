"""The device planner: every token of every row in one split, within the bound that the host has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import split_plan
from kernels.split_plan import (
    Contexts,
    PlannerConfig,
    PlanShape,
    balanced,
    fixed_count,
    fixed_length,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = PlanShape(num_kv_heads=8, block_n=64, resident=264)
K = 1024


def contexts(lens, window=None, prefix=None, parts=None):
    def on_device(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)

    most = max(parts) if parts else 0
    return Contexts(
        on_device(lens), max(lens, default=0), window, on_device(prefix), on_device(parts), most
    )


def rows_of(table):
    """Row -> its items' (begin, end, part, first part, parts, splits), in order."""
    rows = {}
    for row, *item in table.items[: int(table.num_items)].tolist():
        rows.setdefault(row, []).append(item[:6])
    return rows


def check(table, lens, window=None, prefix=None, parts=None):
    assert int(table.num_items) <= table.max_items
    assert not table.arrivals.any()
    next_part = 0
    rows = rows_of(table)
    assert sorted(rows) == list(range(len(lens)))
    for row, length in enumerate(lens):
        items = rows[row]
        first = 0 if window is None else max(0, length - window)
        first = max(first, prefix[row] if prefix else 0)
        seen = [token for begin, end, *_ in items for token in range(begin, end)]
        assert seen == list(range(first, length))
        extra = parts[row] if parts else 0
        assert table.row_parts[row].tolist() == [next_part, len(items), len(items) + extra]
        for index, (_, _, part, first_part, num_parts, splits) in enumerate(items):
            assert (part, first_part) == (next_part + index, next_part)
            assert (num_parts, splits) == (len(items) + extra, len(items))
        next_part += len(items) + extra
    assert next_part <= table.max_parts


@settings(max_examples=6, deadline=None)
@given(
    lens=st.lists(st.integers(0, 3000), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 100, 5000]),
    planner=st.sampled_from(
        [
            balanced,
            lambda c, s: fixed_length(c, s, 128),
            lambda c, s: fixed_count(c, s, 3),
            lambda c, s: fixed_count(c, s, 1),
        ]
    ),
)
def test_every_token_is_in_one_split(lens, window, planner):
    check(planner(contexts(lens, window), SHAPE), lens, window)


def test_prefixes_are_left_out_and_their_parts_counted():
    lens, prefix, parts = [700, 300, 90, 1000], [512, 0, 64, 640], [2, 0, 1, 3]
    check(balanced(contexts(lens, None, prefix, parts), SHAPE), lens, prefix=prefix, parts=parts)


def test_more_rows_than_a_block_keep_their_order(monkeypatch):
    monkeypatch.setattr(split_plan, "BLOCKS_OF_ROWS", (16,))
    lens = [(37 * i) % 130 for i in range(20)]
    check(balanced(contexts(lens), SHAPE), lens)


@pytest.mark.parametrize("rows", [2, 8])
def test_programs_of_several_rows_write_the_same_plan(rows):
    lens, prefix, parts = [9000, 0, 64, 700, 1], [128, 0, 0, 640, 0], [2, 0, 0, 3, 1]
    given = contexts(lens, None, prefix, parts)
    table = balanced(given, SHAPE, config=PlannerConfig(rows, num_warps=2))
    check(table, lens, prefix=prefix, parts=parts)
    assert rows_of(table) == rows_of(balanced(given, SHAPE, config=PlannerConfig(1, num_warps=1)))


@pytest.mark.parametrize(
    ("lens", "splits"),
    [  # the best counts of sweeps on an H200, where 264 programs are resident
        ([K], 8),
        ([32 * K], 32),
        ([8 * K] * 16, 2),
        ([32 * K] * 8, 4),
        ([4 * K] * 32, 1),
    ],
)
def test_balanced_fills_the_card_with_whole_rounds(lens, splits):
    assert balanced(contexts(lens), SHAPE).read()["splits"] == [splits] * len(lens)


def test_balanced_cuts_a_row_that_would_end_last():
    longest = balanced(contexts([128 * K, *[K] * 63]), SHAPE).read()["split_tokens"][0]
    assert longest <= 2 * K


def test_fixed_length_cuts_at_the_same_positions_in_any_batch():
    alone = fixed_length(contexts([2000], 700), SHAPE)
    beside = fixed_length(contexts([5, 2000, 3000], 700), SHAPE)
    edges = [item[:2] for item in rows_of(alone)[0]]
    assert edges == [[1300, 1536], [1536, 2000]]
    assert [item[:2] for item in rows_of(beside)[1]] == edges


@pytest.mark.parametrize("split_tokens", [0, 100, -64])
def test_fixed_length_refuses_splits_that_are_not_whole_tiles(split_tokens):
    with pytest.raises(
        ValueError, match=r"split_tokens must be a positive multiple of the tile .64."
    ):
        fixed_length(contexts([10]), SHAPE, split_tokens)


@pytest.mark.parametrize("splits", [0, 1025])
def test_fixed_count_is_bounded(splits):
    with pytest.raises(ValueError, match=f"splits must be in 1 .. 1024, got {splits}"):
        fixed_count(contexts([10]), SHAPE, splits)
