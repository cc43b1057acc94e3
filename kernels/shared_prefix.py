"""Decode attention that reads a prefix shared by several rows once for all of them (cascade
inference, arXiv:2402.05099), then each row's own suffix by split-KV decode.

kernels/prefix_groups.py finds the rows. Their query heads are packed into tiles, so that the tensor
cores serve many rows with each key; a program attends to one split of a prefix for
one tile and KV head, and leaves a partial result for every row. The splits of a row's suffix are
merged with them by log-sum-exp, by the kernels that merge splits without a prefix. Where nothing is
worth sharing, the results are those of SplitKV bit for bit.

The programs of the prefix kernel are as many as the card holds, and take the items in turn."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import require
from kernels.jit import LOG2E, dot, soft_cap, upcast
from kernels.launch import Launcher, num_sms
from kernels.prefix_groups import PrefixShape, PrefixTable, group_rows, may_share
from kernels.split_kernel import slots_of
from kernels.split_kv import Planner, SplitKV
from kernels.split_launch import (
    Address,
    DecodeConfig,
    DecodeLauncher,
    Ready,
    Scores,
)
from kernels.split_plan import Contexts, PlanShape, SplitTable

HOPPER_SHARED_BYTES = 232448
"""That a program may take; it stands for the device where there is none to ask."""


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """Launch parameters. block_m: packed queries of a tile, a power of two; block_n: tokens of a
    tile. per_sm: programs that a multiprocessor holds."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    per_sm: int = 1


HOPPER = {  # (bytes of a K element, head_dim rounded up): the largest that spills nothing
    (2, 128): PrefixConfig(),
    (2, 256): PrefixConfig(block_m=64, block_n=32, num_warps=4, num_stages=3),
    (1, 128): PrefixConfig(num_stages=4),  # a stage more: K and V are converted on their way
    (1, 256): PrefixConfig(block_m=64, block_n=32, num_stages=3),
    (4, 128): PrefixConfig(block_m=32, block_n=32, num_stages=3),
    (4, 256): PrefixConfig(block_m=16, block_n=16, num_warps=4, num_stages=3),
}
SMALLER = HOPPER | {  # 99 KB of shared memory are enough
    (2, 128): PrefixConfig(block_m=64, num_warps=4, num_stages=3),
    (2, 256): PrefixConfig(block_m=32, block_n=32, num_warps=4, num_stages=3),
    (1, 128): PrefixConfig(block_m=64, num_warps=4, num_stages=3),
    (1, 256): PrefixConfig(block_m=32, block_n=32, num_warps=4, num_stages=3),
}


@dataclass(frozen=True, slots=True, eq=False)
class SharedTable(SplitTable):
    """The rows' own splits, and the prefixes before them."""

    prefixes: PrefixTable
    config: PrefixConfig

    def read(self) -> dict[str, Any]:
        """As SplitTable.read, and "prefixes": see PrefixTable.read."""
        return SplitTable.read(self) | {"prefixes": self.prefixes.read()}


@dataclass(frozen=True, slots=True, eq=False)
class SharedReady(Ready):
    """With the launch of the prefix kernel, which comes first."""

    prefix: tuple[Any, tuple[int, int], tuple[Any, ...]]


class SharedPrefix(SplitKV):
    """A decode kernel as SplitKV, for batches in which rows begin with the same pages.

    splits ("auto" or a number), planner, config: SplitKV's, for the rows' own splits.
    prefix_config: launch parameters of the prefix kernel, None = by device and shape.
    min_prefix_tokens: shorter prefixes are not shared. min_saved_bytes: of K and V that a layer
    must be spared for any sharing; the default is what 4 TB/s read during the launch and the merges
    that it adds.

    A call with a window shares nothing."""

    def __init__(
        self,
        splits: str | int = "auto",
        planner: Planner | None = None,
        config: DecodeConfig | None = None,
        prefix_config: PrefixConfig | None = None,
        min_prefix_tokens: int = 128,
        min_saved_bytes: int = 24 * 2**20,
    ) -> None:
        require(min_prefix_tokens >= 1, "min_prefix_tokens", ">= 1", min_prefix_tokens)
        require(min_saved_bytes >= 0, "min_saved_bytes", ">= 0", min_saved_bytes)
        require(splits != "invariant", "splits", "auto or a number: rows depend on others", splits)
        super().__init__(splits, planner, config)
        self.capabilities = replace(self.capabilities, batch_invariant=False)
        self._prefix_config = prefix_config
        self._min_tokens = min_prefix_tokens
        self._min_saved_bytes = min_saved_bytes
        self._launch = SharedLauncher()

    def table(
        self,
        contexts: Contexts,
        shape: PlanShape,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        address: Address,
    ) -> SplitTable:
        """The rows' own splits and, where the batch may have any, shared prefixes."""
        *_, num_kv_heads, head_dim = cache[0].shape
        group = q.shape[1] // num_kv_heads
        token_bytes = 2 * num_kv_heads * head_dim * cache[0].itemsize
        config = self.prefix_configuration(q.device, head_dim, cache[0].dtype, group)
        prefix_shape = PrefixShape(
            num_kv_heads=num_kv_heads,
            block_n=config.block_n,
            tile_rows=config.block_m // group,
            resident=_resident(config, q.device),
            min_tokens=self._min_tokens,
            min_saved_tokens=self._min_saved_bytes // token_bytes,
        )
        if contexts.window is not None or not may_share(len(q), contexts.longest, prefix_shape):
            return self._planner(contexts, shape)
        prefixes = group_rows(address.slots, contexts.lens, address.page_size, prefix_shape)
        own = self._planner(
            replace(
                contexts,
                prefix_lens=prefixes.lens,
                prefix_parts=prefixes.parts,
                max_prefix_parts=prefixes.max_parts,
            ),
            shape,
        )
        return SharedTable(
            own.items, own.num_items, own.row_parts, own.arrivals, own.max_parts, prefixes, config
        )

    def prefix_configuration(
        self, device: torch.device, head_dim: int, kv_dtype: torch.dtype, group: int
    ) -> PrefixConfig:
        """Launch parameters of the prefix kernel. Raises ValueError for a given tile that holds no
        group."""
        if self._prefix_config is not None:
            block_m = self._prefix_config.block_m
            require(block_m >= group, "block_m", f"at least a group ({group})", block_m)
            return self._prefix_config
        limit = HOPPER_SHARED_BYTES
        if device.type == "cuda":
            limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        table = HOPPER if limit >= HOPPER_SHARED_BYTES else SMALLER
        return table[kv_dtype.itemsize, 128 if head_dim <= 128 else 256]

    def describe(
        self, device: str, head_dim: int, kv_dtype: str, page_size: int, group: int
    ) -> dict[str, Any]:
        """Splits and configurations, for the manifest."""
        found = super().describe(device, head_dim, kv_dtype, page_size, group)
        dtype = getattr(torch, kv_dtype)
        config = self.prefix_configuration(torch.device(device), head_dim, dtype, group)
        return found | {"prefix_configuration": asdict(config)}


class SharedLauncher(DecodeLauncher):
    """Launches the prefix kernel before those of SplitKV."""

    def __init__(self) -> None:
        super().__init__()
        self._prefix = Launcher(prefix_kernel)

    def first(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        partials: tuple[Tensor, Tensor],
        table: SplitTable,
        address: Address,
        scores: Scores,
        config: DecodeConfig,
        apart: bool,
    ) -> Ready:
        """As DecodeLauncher.first."""
        rest = (key, tensors, partials, table, address, scores, config, apart)
        if not isinstance(table, SharedTable):
            return super().first(*rest)
        q, k_cache, _, *_ = tensors
        prefixes, chosen = table.prefixes, table.config
        planned = (*partials, prefixes.items, prefixes.num_items, prefixes.order)
        planned = (*planned, table.row_parts, address.slots)
        numbers = (
            *(address.slots.stride(0), q.stride(0), q.stride(1)),
            *(scores.scale * scores.k_scale, scores.v_scale, scores.softcap or 0.0),
        )
        units = len(prefixes.items) * k_cache.shape[-2]
        grid = (min(_resident(chosen, q.device), units), 1)
        self._prefix(
            key,
            grid,
            (*tensors[:3], *planned, *numbers),
            lambda: _constants(q, k_cache, key, chosen),
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
        pointers = tuple(tensor.data_ptr() for tensor in planned)
        ready = super().first(*rest)
        prefix = (key, grid, (*pointers, *numbers))
        return SharedReady(ready.table, ready.decode, ready.merge, prefix)

    def again(self, ready: Ready, pointers: tuple[int, ...]) -> None:
        """As DecodeLauncher.again."""
        if isinstance(ready, SharedReady):
            key, grid, fixed = ready.prefix
            self._prefix.again(key, grid, (*pointers[:3], *fixed))
        super().again(ready, pointers)


@triton.jit(do_not_specialize_on_alignment=["p_slots"])
def prefix_kernel(
    p_q, p_k, p_v, p_partial_out, p_partial_lse, p_items, p_num_items, p_order, p_row_parts,
    p_slots, stride_row, stride_q_row, stride_q_head, qk_scale, v_scale, cap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Items and KV heads in turn. A packed query is a row of the item and one of GROUP heads. Slots
    are carried one tile ahead, as in decode_kernel."""
    i_m = tl.arange(0, BLOCK_M)
    i_d = tl.arange(0, BLOCK_D)
    i_n = tl.arange(0, BLOCK_N)
    in_head = i_d < HEAD_DIM
    num_units = tl.load(p_num_items) * NUM_KV_HEADS
    # Invariants hoisted from this loop would hold registers throughout the inner one.
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0), disable_licm=True):
        head = unit % NUM_KV_HEADS
        p_item = p_items + unit // NUM_KV_HEADS * 8
        place = tl.load(p_item)
        num_rows = tl.load(p_item + 1)
        begin = tl.load(p_item + 2)
        end = tl.load(p_item + 3)
        split = tl.load(p_item + 4)
        valid = i_m < num_rows * GROUP
        b_row = tl.load(p_order + place + i_m // GROUP, mask=valid, other=0).to(tl.int64)
        b_head = head * GROUP + i_m % GROUP
        in_q = valid[:, None] & in_head[None, :]
        p_query = p_q + (b_row * stride_q_row + b_head * stride_q_head)[:, None] + i_d[None, :]
        b_q = tl.load(p_query, mask=in_q, other=0.0)
        # All rows have the same pages there: the first one's table serves.
        p_row = p_slots + tl.load(p_order + place).to(tl.int64) * stride_row
        p_keys = p_k + head * HEAD_DIM
        p_values = p_v + head * HEAD_DIM

        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        last = end - 1
        b_slot = slots_of(p_row, tl.minimum(begin + i_n, last), PAGE_SIZE)
        for start in range(begin, end, BLOCK_N):
            o_slot = b_slot.to(tl.int64) * SLOT_STRIDE
            if BLOCK_D == HEAD_DIM:
                b_k = tl.load(p_keys + o_slot[:, None] + i_d[None, :])
                b_v = tl.load(p_values + o_slot[:, None] + i_d[None, :])
            else:
                in_k = in_head[None, :]
                b_k = tl.load(p_keys + o_slot[:, None] + i_d[None, :], mask=in_k, other=0.0)
                b_v = tl.load(p_values + o_slot[:, None] + i_d[None, :], mask=in_k, other=0.0)
            b_slot = slots_of(p_row, tl.minimum(start + BLOCK_N + i_n, last), PAGE_SIZE)
            b_s = dot(
                b_q, tl.trans(b_k.to(b_q.dtype)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST
            )
            if HAS_CAP:
                b_s = soft_cap(b_s * qk_scale, cap) * LOG2E
            else:
                b_s *= qk_scale * LOG2E
            b_s = tl.where((start + i_n < end)[None, :], b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_old = tl.exp2(b_max - b_new)
            b_p = tl.exp2(b_s - b_new[:, None])
            b_sum = b_sum * b_old + tl.sum(b_p, 1)
            b_acc = dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc * b_old[:, None], UPCAST)
            b_max = b_new

        # A row's partial results of the prefix lie behind those of its own splits.
        p_parts = p_row_parts + b_row * 3
        b_part = tl.load(p_parts, mask=valid, other=0)
        b_part += tl.load(p_parts + 1, mask=valid, other=0) + split
        o_part = b_part.to(tl.int64) * (NUM_KV_HEADS * GROUP) + b_head
        b_out = b_acc * (v_scale / b_sum)[:, None]
        tl.store(p_partial_out + o_part[:, None] * HEAD_DIM + i_d[None, :], b_out, mask=in_q)
        tl.store(p_partial_lse + o_part, b_max + tl.log2(b_sum), mask=valid)


def _constants(
    q: Tensor, k_cache: Tensor, key: tuple[Any, ...], config: PrefixConfig
) -> dict[str, Any]:
    _, page_size, capped, _, _ = key
    num_kv_heads, head_dim = k_cache.shape[-2:]
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": q.shape[1] // num_kv_heads,
        "HEAD_DIM": head_dim,
        "SLOT_STRIDE": k_cache.stride(-3),
        "PAGE_SIZE": page_size,
        "BLOCK_M": config.block_m,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_N": config.block_n,
        "HAS_CAP": capped,
        "UPCAST": upcast(q.dtype),
    }


def _resident(config: PrefixConfig, device: torch.device) -> int:
    return config.per_sm * num_sms(device, on_cpu=1)
