"""The executor's block table on the device: a step's updates in one launch, and all that is derived
from it for attention in a second."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import (
    check_column,
    check_contiguous,
    check_device,
    check_int32,
    check_page_size,
    check_runs,
    require,
)

BLOCK: tl.constexpr = tl.constexpr(1024)


@dataclass(frozen=True, slots=True)
class StepTables:
    """What a step's attention needs, N rows with T tokens: page_table int32 [N, max_pages],
    context_lens int32 [N], query_starts int32 [N + 1], slots int64 [T]."""

    page_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    slots: Tensor


# A step's inputs are pieces of one upload, at multiples of 8 bytes: no variant for each alignment.
@triton.jit(
    do_not_specialize=["num_resets", "num_updates"],
    do_not_specialize_on_alignment=["p_resets", "p_updates"],
)
def update_kernel(
    p_table,
    p_resets,
    p_updates,
    num_resets,
    num_updates,
    table_stride,
    MAX_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i < num_resets clears row resets[i] and applies the updates of that row; the others
    apply a block of updates each, those of cleared rows left out. So no program waits for
    another, and an update always lands on its cleared row."""
    program = tl.program_id(0)
    i_lane = tl.arange(0, BLOCK)
    if program < num_resets:
        row = tl.load(p_resets + program)
        p_row = p_table + row * table_stride
        for first in tl.static_range(0, MAX_PAGES, BLOCK):
            tl.store(p_row + first + i_lane, 0, mask=first + i_lane < MAX_PAGES)
        tl.debug_barrier()  # the zeros of all warps before the pages of any
        first_update = num_updates * 0
        while first_update < num_updates:
            i_update = first_update + i_lane
            valid = i_update < num_updates
            b_row = tl.load(p_updates + i_update * 3, mask=valid, other=-1)
            valid = valid & (b_row == row)
            b_index = tl.load(p_updates + i_update * 3 + 1, mask=valid, other=0)
            b_page = tl.load(p_updates + i_update * 3 + 2, mask=valid, other=0)
            tl.store(p_row + b_index, b_page.to(tl.int32), mask=valid)
            first_update += BLOCK
    else:
        i_update = (program - num_resets) * BLOCK + i_lane
        valid = i_update < num_updates
        b_row = tl.load(p_updates + i_update * 3, mask=valid, other=-1)
        i_reset = num_resets * 0
        while i_reset < num_resets:
            valid = valid & (b_row != tl.load(p_resets + i_reset))
            i_reset += 1
        b_index = tl.load(p_updates + i_update * 3 + 1, mask=valid, other=0)
        b_page = tl.load(p_updates + i_update * 3 + 2, mask=valid, other=0)
        tl.store(p_table + b_row * table_stride + b_index, b_page.to(tl.int32), mask=valid)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=[
        "p_rows",
        "p_context_lens",
        "p_query_starts",
        "p_token_rows",
        "p_positions",
    ],
)
def step_kernel(
    p_table,
    p_rows,
    p_context_lens,
    p_query_starts,
    p_token_rows,
    p_positions,
    p_out_table,
    p_out_lens,
    p_out_starts,
    p_out_slots,
    num_rows,
    num_tokens,
    table_stride,
    MAX_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i < num_rows * blocks of a row copies a block of a table row; the others compute a
    block of slots and narrow a block of lengths and starts."""
    ROW_BLOCKS: tl.constexpr = (MAX_PAGES + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    i_lane = tl.arange(0, BLOCK)
    if program < num_rows * ROW_BLOCKS:
        i_row = program // ROW_BLOCKS
        i_page = program % ROW_BLOCKS * BLOCK + i_lane
        inside = i_page < MAX_PAGES
        row = tl.load(p_rows + i_row)
        b_pages = tl.load(p_table + row * table_stride + i_page, mask=inside, other=0)
        tl.store(p_out_table + i_row.to(tl.int64) * MAX_PAGES + i_page, b_pages, mask=inside)
    else:
        i_token = (program - num_rows * ROW_BLOCKS) * BLOCK + i_lane
        inside = i_token < num_tokens
        b_row = tl.load(p_token_rows + i_token, mask=inside, other=0)
        b_position = tl.load(p_positions + i_token, mask=inside, other=0)
        p_page = p_table + b_row * table_stride + b_position // PAGE_SIZE
        b_page = tl.load(p_page, mask=inside, other=0).to(tl.int64)
        b_slot = b_page * PAGE_SIZE + b_position % PAGE_SIZE
        tl.store(p_out_slots + i_token, b_slot, mask=inside)
        is_row = i_token < num_rows
        b_len = tl.load(p_context_lens + i_token, mask=is_row, other=0)
        tl.store(p_out_lens + i_token, b_len.to(tl.int32), mask=is_row)
        is_start = i_token <= num_rows
        b_start = tl.load(p_query_starts + i_token, mask=is_start, other=0)
        tl.store(p_out_starts + i_token, b_start.to(tl.int32), mask=is_start)


def update_table(table: Tensor, reset_rows: Tensor, updates: Tensor) -> None:
    """Point `reset_rows` int64 [k] (distinct) of the table int32 [num_rows, max_pages] at page 0,
    then apply updates int64 [n, 3] of (row, page index, page id), distinct in row and index. Raises
    ValueError for what it cannot take; values are the caller's word."""
    _check_table(table)
    check_column("reset_rows", reset_rows, len(reset_rows), table, torch.int64)
    holds = updates.dim() == 2 and updates.shape[1] == 3
    require(holds, "updates", "[n, 3]", tuple(updates.shape))
    require(updates.dtype == torch.int64, "updates dtype", "int64", updates.dtype)
    check_contiguous("updates", updates)
    check_device("updates", updates, table)
    num_resets, num_updates = len(reset_rows), len(updates)
    programs = num_resets + triton.cdiv(num_updates, BLOCK.value)
    if programs:
        update_kernel[(programs,)](
            table,
            reset_rows,
            updates,
            num_resets,
            num_updates,
            table.stride(0),
            MAX_PAGES=table.shape[1],
            BLOCK=BLOCK.value,
        )


def step_tables(
    table: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    page_size: int,
) -> StepTables:
    """A step's tables, from the block table int32 [num_rows, max_pages] and int64 tensors: rows and
    context_lens [N], query_starts [N + 1], token_rows and positions [T]. page_size: a power
    of two. A token's slot is table[row, position // page_size] * page_size + position % page_size.
    Raises ValueError for what it cannot take; values are the caller's word."""
    _check_table(table)
    check_page_size(page_size)
    num_rows, num_tokens, max_pages = len(rows), len(positions), table.shape[1]
    columns = (
        ("rows", rows, num_rows),
        ("context_lens", context_lens, num_rows),
        ("query_starts", query_starts, num_rows + 1),
        ("token_rows", token_rows, num_tokens),
        ("positions", positions, num_tokens),
    )
    for name, column, length in columns:
        check_column(name, column, length, table, torch.int64)
    out = StepTables(
        page_table=table.new_empty(num_rows, max_pages),
        context_lens=table.new_empty(num_rows),
        query_starts=table.new_empty(num_rows + 1),
        slots=positions.new_empty(num_tokens),
    )
    # Places for tokens and for rows, and one more, the last start.
    blocks = triton.cdiv(max_pages, BLOCK.value) * num_rows
    places = max(num_tokens, num_rows) + 1
    step_kernel[(blocks + triton.cdiv(places, BLOCK.value),)](
        table,
        rows,
        context_lens,
        query_starts,
        token_rows,
        positions,
        out.page_table,
        out.context_lens,
        out.query_starts,
        out.slots,
        num_rows,
        num_tokens,
        table.stride(0),
        MAX_PAGES=max_pages,
        PAGE_SIZE=page_size,
        BLOCK=BLOCK.value,
    )
    return out


def _check_table(table: Tensor) -> None:
    check_int32("table", table, 2)
    require(table.shape[1] >= 1, "table columns", ">= 1", table.shape[1])
    require(table.stride(1) == 1, "table strides", "1 along a row", table.stride())
    check_runs(table)
