"""Attention whose result for a token has the same bits in any batch and however its context was
computed: token by token, in chunks of any size, or again after a preemption.

One kernel serves rows of one token and of many. Three things make it so:

- Keys are visited in tiles at multiples of BLOCK_N from position 0 on, and every tile by the same
  instructions: the mask is always applied, and products are never contracted with sums, so that two
  compiled forms cannot round differently. A tile that a query does not see changes nothing: its
  weights are 0, the running maximum stays, and the old sum is multiplied by 1.
- Contexts are cut at multiples of `split_tokens`, whatever else is in the batch. Softmax begins
  anew in each split, and normalised partial results are folded in order of splits. One program may
  fold all splits of a tile in registers, or several leave them to a second kernel, by the same
  function.
- The shape of a tile is fixed, since the order in which a row of scores is summed follows the
  layout that the compiler chose for it. A row of one token fills a fraction of its tile, which
  costs little where reading K and V takes longer than the products.

kernels/invariant_kernel.py is the device side."""

from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels import extend as plain
from kernels.check import check_softcap, check_window, require, result_like
from kernels.declare import Rows
from kernels.extend_check import Form, check_extend, extend_form
from kernels.extend_plan import make_tiles
from kernels.invariant_kernel import FOLD, ONE, PARTS, fold_kernel, invariant_kernel
from kernels.jit import LOG2E, upcast
from kernels.launch import Launcher, num_sms

SPLIT_TOKENS = 4096
MAX_PARTIAL_BYTES = 256 << 20
"""Partial results kept at once; beyond, a program folds all splits of its tile."""

ROUNDS = 4
"""How many times programs may fill a device that holds one on each multiprocessor."""


@dataclass(frozen=True, slots=True)
class InvariantConfig:
    """Launch parameters. block_m: packed queries of a tile; block_n: keys of a tile. Results depend
    on all but num_stages."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(slots=True, eq=False)
class InvariantPlan:
    """A step's rows. longest: bound of their contexts, in tokens. ones: rows of one token. The
    table of tiles is made when a layer first needs it."""

    query_starts: Tensor
    context_lens: Tensor
    longest: int
    ones: bool
    tiles: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    forms: set[Form] = field(default_factory=set)  # of arguments that were checked

    def table(self, num_tokens: int, pack: int, block_m: int) -> Tensor:
        """The tile table for `num_tokens` packed tokens; see make_tiles."""
        key = num_tokens, pack, block_m
        if key not in self.tiles:
            self.tiles[key] = make_tiles(self.query_starts, self.context_lens, *key)
        return self.tiles[key]


class _Invariant:
    """What both kernels share. split_tokens: where contexts are cut, a multiple of 64."""

    def __init__(
        self, split_tokens: int = SPLIT_TOKENS, config: InvariantConfig | None = None
    ) -> None:
        holds = split_tokens >= 64 and split_tokens % 64 == 0
        require(holds, "split_tokens", "a positive multiple of 64", split_tokens)
        tile = 64 if config is None else config.block_n
        require(64 % tile == 0, "config.block_n", "a divisor of 64", tile)
        self.split_tokens = split_tokens
        self._config = config
        self.capabilities = replace(
            plain.CAPABILITIES,
            batch_invariant=True,
            reduction_order=f"{__name__}, split at multiples of {split_tokens}",
        )
        self._run = Launcher(invariant_kernel)
        self._fold = Launcher(fold_kernel)

    def describe(
        self, device: str, head_dim: int, kv_dtype: str, page_size: int, group: int
    ) -> dict[str, Any]:
        """Launch parameters, for the manifest. Over a cache of 8 bits q is taken to be half
        precision."""
        del device, page_size, group
        cache_dtype = getattr(torch, kv_dtype)
        dtype = torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype
        config = self._config or default_config(dtype, head_dim)
        return {"configuration": asdict(config), "split_tokens": self.split_tokens}

    def _attend(
        self,
        tensors: tuple[Tensor, ...],
        plan: InvariantPlan,
        factors: tuple[float, float | None, float, float],
        window: int | None,
        return_lse: bool,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tensors, factors: as extend's, the latter scale, softcap, k_scale, v_scale."""
        scale, softcap, k_scale, v_scale = factors
        form = extend_form(*tensors)
        if form not in plan.forms:
            check_extend(self.capabilities, *tensors)
            plan.forms.add(form)
        require(scale > 0 and k_scale > 0, "scale, k_scale", "> 0", (scale, k_scale))
        check_window(window)
        check_softcap(softcap)
        q = tensors[0]
        out = result_like("out", out, q, q.shape, q.dtype)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        if q.shape[0]:
            # Softmax in base 2; a soft cap is applied to natural scores.
            unit = 1.0 if softcap is not None else LOG2E.value
            cap = None if softcap is None else float(softcap)
            numbers = float(scale * k_scale * unit), cap, float(v_scale)
            self._launch(form[0], tensors, plan, numbers, window, out, lse)
        return out if lse is None else (out, lse)

    def _launch(
        self,
        form: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        plan: InvariantPlan,
        numbers: tuple[float, float | None, float],
        window: int | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        q, k_cache, v_cache, page_table = tensors[:4]
        num_tokens, heads, head_dim = q.shape
        config = self._config or default_config(q.dtype, head_dim)
        group = heads // k_cache.shape[2]
        tiles = plan.table(num_tokens, group, config.block_m)
        num_blocks = tiles.shape[0] * k_cache.shape[2]
        splits = max(1, -(-plan.longest // self.split_tokens))
        programs = self._programs(q, splits, num_blocks)
        kind = (ONE if splits == 1 else FOLD if programs == 1 else PARTS).value
        part, part_lse = out, lse
        if kind == PARTS.value:
            part = q.new_empty((splits, *q.shape), dtype=torch.float32)
            part_lse = q.new_empty((splits, num_tokens, heads), dtype=torch.float32)
        block_d = 1 << (head_dim - 1).bit_length()
        key = form, config, window, kind, plan.ones, numbers[1] is None, lse is None
        self._run(
            key,
            (num_blocks, programs),
            (
                *(q, k_cache, v_cache, part, part_lse, page_table, tiles),
                *(plan.query_starts, plan.context_lens, q.stride(0), q.stride(1)),
                *(k_cache.stride(1), page_table.stride(0), tiles.shape[0]),
                *(plan.context_lens.shape[0], num_tokens, splits, *numbers),
            ),
            lambda: {
                "HEADS": heads, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": block_d,
                "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PAGE": k_cache.shape[1],
                "WINDOW": window or 0, "SPLIT": self.split_tokens, "FORM": kind,
                "HEAD_FAST": plan.ones, "UPCAST": upcast(q.dtype),
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            # A product contracted with a sum is rounded once: in one form of the kernel and not in
            # another.
            enable_fp_fusion=False,
        )  # fmt: skip
        if kind == PARTS.value and part_lse is not None:
            self._fold_parts(key, part, part_lse, out, lse)

    def _fold_parts(
        self, key: tuple[Any, ...], part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Fold part [S, T, Hq, D] and part_lse [S, T, Hq] into out and, if wanted, lse."""
        head_dim, pairs, block = part.shape[3], part_lse[0].numel(), 16
        block_d = 1 << (head_dim - 1).bit_length()
        self._fold(
            key,
            (-(-pairs // block), 1),
            (part, part_lse, out, lse, pairs, len(part)),
            lambda: {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_P": block},
            num_warps=4,
            enable_fp_fusion=False,
        )

    def _programs(self, q: Tensor, splits: int, num_blocks: int) -> int:
        """How many share a tile's splits. Only speed depends on it."""
        room = MAX_PARTIAL_BYTES // (4 * q.shape[0] * q.shape[1] * q.shape[2])
        if splits > room:
            return 1
        wanted = ROUNDS * num_sms(q.device, on_cpu=plain.INTERPRETED_SMS)
        return min(splits, max(1, wanted // num_blocks))


class InvariantDecode(_Invariant):
    """The decode kernel: an object with `capabilities`, `plan` and a call. Raises ValueError."""

    def plan(self, rows: Rows) -> InvariantPlan:
        """Metadata for a call. Host lengths are not read, so that a graph may capture it."""
        longest = rows.page_table.shape[1] * rows.page_size
        return InvariantPlan(rows.query_starts, rows.context_lens, longest, ones=True)

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
        plan: InvariantPlan | None = None,
        softcap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One query token a row over its context: as kernels.split_kv.SplitKV."""
        require(len(q) == len(context_lens), "q", f"{len(context_lens)} rows", len(q))
        if plan is None:
            starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            longest = page_table.shape[1] * k_cache.shape[1]
            plan = InvariantPlan(starts, context_lens, longest, ones=True)
        tensors = q, k_cache, v_cache, page_table, context_lens, plan.query_starts
        factors = scale, softcap, k_scale, v_scale
        return self._attend(tensors, plan, factors, window, return_lse, out)


class InvariantExtend(_Invariant):
    """The extend kernel: an object with `capabilities`, `plan` and a call. Raises ValueError."""

    def plan(self, rows: Rows) -> InvariantPlan:
        """Metadata for a call. Of the host's lengths only the longest steers it, and only speed
        depends on it."""
        longest = max(rows.host_context_lens, default=0)
        return InvariantPlan(rows.query_starts, rows.context_lens, longest, ones=False)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        scale: float,
        window: int | None = None,
        *,
        plan: InvariantPlan | None = None,
        softcap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Each row's new tokens over its cached prefix and, causally, themselves: as
        kernels.extend.extend."""
        if plan is None:
            longest = page_table.shape[1] * k_cache.shape[1]
            plan = InvariantPlan(query_starts, context_lens, longest, ones=False)
        tensors = q, k_cache, v_cache, page_table, context_lens, query_starts
        factors = scale, softcap, k_scale, v_scale
        return self._attend(tensors, plan, factors, window, return_lse, out)


@lru_cache(maxsize=64)
def default_config(dtype: torch.dtype, head_dim: int) -> InvariantConfig:
    """One for each type and head dim, whatever the batch."""
    if dtype == torch.float32:
        return InvariantConfig(16, 32, num_warps=8, num_stages=2)
    if triton.next_power_of_2(head_dim) > 128:
        return InvariantConfig(64, 32, num_warps=8, num_stages=2)
    return InvariantConfig()


decode = InvariantDecode()
extend = InvariantExtend()
"""The two with contexts cut at multiples of SPLIT_TOKENS."""
