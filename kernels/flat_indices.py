"""Split-KV decode over one flat list of slots: the tokens of all rows one after another, and where
each row begins, instead of a block table.

The kernel is that of kernels/split_kv.py; only the look-up of a token's slot differs. The engine
keeps block tables, so the plan of a step writes the list from them, once for all layers."""

from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_column, check_contiguous, check_int32, check_table, require
from kernels.declare import Rows
from kernels.split_kv import Planner, SplitKV, SplitPlan
from kernels.split_launch import Address, DecodeConfig, Scores

BLOCK_TOKENS = 1024


@dataclass(slots=True, eq=False)
class FlatPlan(SplitPlan):
    """A split plan with the list. slots int32 [room for every row at its longest], starts int64
    [N]."""

    address: Address | None = field(default=None, kw_only=True)


class FlatIndices(SplitKV):
    """As SplitKV (splits, planner, config), over a flat list of slots."""

    def __init__(
        self,
        splits: str | int = "auto",
        planner: Planner | None = None,
        config: DecodeConfig | None = None,
    ) -> None:
        super().__init__(splits, planner, config)
        self.capabilities = replace(self.capabilities, address="slots")

    def plan(self, rows: Rows) -> FlatPlan:
        """Writes the list on the device. Raises ValueError as SplitKV's."""
        check_table(rows.page_table, rows.context_lens)
        return _flat_plan(rows.page_table, rows.context_lens, rows.page_size)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None = None,
        *,
        plan: FlatPlan | None = None,
        softcap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As SplitKV's call; the block table is read by the plan alone."""
        self.check(q, k_cache, v_cache, page_table, context_lens)
        plan = plan or _flat_plan(page_table, context_lens, k_cache.shape[1])
        assert plan.address is not None, "a flat plan has its list"
        scores = Scores(scale, softcap, k_scale, v_scale)
        cache = (k_cache, v_cache)
        return self.run(q, cache, plan.address, plan, scores, window, return_lse, out)

    def over_list(
        self,
        q: Tensor,
        k_slots: Tensor,
        v_slots: Tensor,
        slots: Tensor,
        starts: Tensor,
        context_lens: Tensor,
        longest: int,
        scores: Scores,
        window: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Decode over a list the caller has: k_slots, v_slots [num_slots, Hkv, D]; slots int32
        [total]; row i's tokens in order at slots[starts[i]:], starts int64 [N]; context_lens int32
        [N], none above longest. The rest as SplitKV's call."""
        check_int32("slots", slots, 1)
        require(len(slots) >= 1, "slots", "at least 1 long", len(slots))
        check_contiguous("slots", slots)
        check_column("starts", starts, len(q), q, torch.int64)
        caches = k_slots.unsqueeze(1), v_slots.unsqueeze(1)  # pages of one slot
        self.check(q, *caches, slots.expand(len(q), -1), context_lens)
        plan = SplitPlan(context_lens, longest)
        address = Address(slots, starts, 0)
        return self.run(q, (k_slots, v_slots), address, plan, scores, window, return_lse, None)


@triton.jit
def _flatten_kernel(
    p_table, p_lens, p_slots, p_starts, stride_row,
    PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i_b = tl.arange(0, BLOCK_B)
    before = tl.zeros([], tl.int64)
    for first in range(0, row, BLOCK_B):
        b_len = tl.load(p_lens + first + i_b, mask=first + i_b < row, other=0)
        before += tl.sum(b_len.to(tl.int64), 0)
    if tl.program_id(1) == 0:
        tl.store(p_starts + row, before)
    length = tl.load(p_lens + row)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = position < length
    page = tl.load(
        p_table + row.to(tl.int64) * stride_row + position // PAGE_SIZE, mask=valid, other=0
    )
    tl.store(p_slots + before + position, page * PAGE_SIZE + position % PAGE_SIZE, mask=valid)


def _flat_plan(page_table: Tensor, context_lens: Tensor, page_size: int) -> FlatPlan:
    num_rows, max_pages = page_table.shape
    longest = max_pages * page_size
    # One more than the rows can hold, so that the list of no rows has an address too.
    slots = page_table.new_empty(num_rows * longest + 1)
    starts = page_table.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        _flatten_kernel[(num_rows, triton.cdiv(longest, BLOCK_TOKENS))](
            page_table,
            context_lens,
            slots,
            starts,
            page_table.stride(0),
            PAGE_SIZE=page_size,
            BLOCK_B=128,
            BLOCK=BLOCK_TOKENS,
            num_warps=4,
        )
    return FlatPlan(context_lens, longest, address=Address(slots, starts, 0))
