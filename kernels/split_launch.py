"""Launches the kernels of split-KV decode: configurations, constants, and the second layer's short
way."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.check import result_like
from kernels.jit import upcast
from kernels.launch import Launcher
from kernels.merge import merge_kernel
from kernels.split_kernel import MERGE_APART, MERGE_LAST, decode_kernel
from kernels.split_plan import SplitTable

MERGED_VALUES = 4096
"""float32 values of partial results that a warp of the merging program holds at once."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch parameters. block_n: tokens of a tile. per_sm: programs that a multiprocessor holds,
    which the planner fills."""

    block_n: int = 64
    num_warps: int = 2
    num_stages: int = 4
    per_sm: int = 2


CANDIDATES = (
    DecodeConfig(),
    DecodeConfig(num_warps=4),
    DecodeConfig(num_warps=4, num_stages=3),
    DecodeConfig(block_n=32, num_warps=4),
    DecodeConfig(block_n=32, num_warps=4, num_stages=3),
    DecodeConfig(block_n=16, num_warps=4, num_stages=3),
    DecodeConfig(block_n=16, num_warps=4, num_stages=2, per_sm=1),
)


def candidates(head_dim: int, dtype: torch.dtype) -> tuple[DecodeConfig, ...]:
    """Configurations for shapes that were not measured, best first: the first whose shared memory
    fits serves. Those left out would spill: wide heads and float32 products hold more registers."""
    block_d = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:
        return CANDIDATES[3:] if block_d <= 64 else CANDIDATES[5:]
    return CANDIDATES[3:] if block_d > 128 else CANDIDATES


@dataclass(frozen=True, slots=True, eq=False)
class Address:
    """How to find a token's slot. Through the block table `slots` int32 [N, max_pages]; or, with
    page_size 0, in the flat list `slots` int32, where row i's begin at starts[i], int64 [N]."""

    slots: Tensor
    starts: Tensor | None
    page_size: int


@dataclass(frozen=True, slots=True)
class Scores:
    """From q . cached k to a score, and from cached v to V."""

    scale: float
    softcap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A call's launches, all but q, caches and outputs: key, grid, and the other arguments as
    numbers, which plan and table keep alive."""

    table: Tensor
    decode: tuple[Any, tuple[int, int], tuple[Any, ...]]
    merge: tuple[Any, tuple[int, int], tuple[Any, ...]] | None


class DecodeLauncher:
    """The decode kernel, and the one that merges where that is done apart."""

    def __init__(self) -> None:
        self._decode = Launcher(decode_kernel)
        self._merge = Launcher(merge_kernel)

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
        """Launch, and return what to launch again. tensors: q, k_cache, v_cache, out and lse (out
        again without one); key: see Launcher."""
        q, k_cache, _, *outputs = tensors
        num_kv_heads = k_cache.shape[-2]
        merge = (MERGE_APART if apart else MERGE_LAST).value
        slots, starts = address.slots, address.starts
        planned = (*partials, table.items, table.num_items, table.arrivals, slots)
        planned = (*planned, slots if starts is None else starts)
        numbers = (
            *(slots.stride(0), q.stride(0), q.stride(1)),
            *(scores.scale * scores.k_scale, scores.v_scale, scores.softcap or 0.0),
        )
        grid = (table.max_items * num_kv_heads, 1)
        self._decode(
            key,
            grid,
            (*tensors, *planned, *numbers),
            lambda: _constants(q, k_cache, key, config, merge),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        decode = (key, grid, (*(tensor.data_ptr() for tensor in planned), *numbers))
        if not apart or table.max_parts == len(q):
            return Ready(slots, decode, None)
        merge_grid = (len(q), q.shape[1])
        inputs = (*partials, table.row_parts)
        self._merge(
            key,
            merge_grid,
            (*outputs, *inputs),
            lambda: _merge_constants(q, key),
            num_warps=4,
        )
        pointers = tuple(tensor.data_ptr() for tensor in inputs)
        return Ready(slots, decode, (key, merge_grid, pointers))

    def again(self, ready: Ready, pointers: tuple[int, ...]) -> None:
        """Launch what `first` left ready with other addresses of its tensors."""
        key, grid, fixed = ready.decode
        self._decode.again(key, grid, (*pointers, *fixed))
        if ready.merge is not None:
            key, grid, fixed = ready.merge
            self._merge.again(key, grid, (*pointers[3:], *fixed))


def outputs(q: Tensor, return_lse: bool, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """out like q, contiguous, and lse float32 [N, Hq], or out again. Raises ValueError for an `out`
    that cannot hold the result."""
    out = result_like("out", out, q, q.shape, q.dtype)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else out


def likeness(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    scores: Scores,
    window: int | None,
    return_lse: bool,
) -> tuple[Any, ...]:
    """All that a call on a plan may vary in, but addresses."""
    k, v = cache
    return (
        *(window, return_lse, scores.scale, scores.softcap, scores.k_scale, scores.v_scale),
        *(q.get_device(), q.shape, q.stride(), q.dtype),
        *(k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype),
    )


def _constants(
    q: Tensor, k_cache: Tensor, key: tuple[Any, ...], config: DecodeConfig, merge: int
) -> dict[str, Any]:
    _, page_size, capped, return_lse, _ = key
    num_kv_heads, head_dim = k_cache.shape[-2:]
    group = q.shape[1] // num_kv_heads
    block_g, block_d = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    values = MERGED_VALUES * config.num_warps // max(1, block_d // 128)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "SLOT_STRIDE": k_cache.stride(-3),
        "PAGE_SIZE": page_size,
        "BLOCK_H": max(16, block_g),
        "BLOCK_G": block_g,
        "BLOCK_D": block_d,
        "BLOCK_N": config.block_n,
        "BLOCK_S": max(1, min(32, values // (block_g * block_d))),
        "HAS_CAP": capped,
        "HAS_LSE": return_lse,
        "UPCAST": upcast(q.dtype),
        "MERGE": merge,
    }


def _merge_constants(q: Tensor, key: tuple[Any, ...]) -> dict[str, Any]:
    *_, return_lse, _ = key
    block_d = triton.next_power_of_2(q.shape[2])
    return {
        "NUM_HEADS": q.shape[1],
        "HEAD_DIM": q.shape[2],
        "BLOCK_D": block_d,
        "BLOCK_S": max(1, 8192 // block_d),
        "HAS_LSE": return_lse,
    }
