"""Ragged prefill attention over a paged KV cache: each row's new tokens attend to its cached prefix
and, causally, to themselves. Any page size, head dim, KV type; sliding window and soft cap.

A program computes one tile of queries of one row (kernels/extend_plan.py makes the table). The
query heads of a KV head are packed into the tile as (token, head) pairs, so that short chunks fill
it. Softmax runs online in base 2 (FlashAttention, arXiv:2205.14135). Keys that every query of the
tile sees are visited without a mask, the edges of the window and the diagonal with one.

Where a token lies is looked up one tile ahead and carried into the next iteration: otherwise Triton
leaves K and V a single buffer. Positions past a row's end repeat its last token, so every address
read is one of the row's own.

A step with few tiles over long contexts would leave most of the device idle; each tile's keys are
then divided among several programs, which leave normalised float32 partial results and their
log-sum-exp, and a second kernel merges them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_softcap, check_window, require, result_like
from kernels.declare import Capabilities, Rows, declare
from kernels.extend_check import Form, check_extend, extend_form
from kernels.extend_merge import MAX_SPLITS, merge_splits
from kernels.extend_plan import NO_LIMIT, make_tiles
from kernels.jit import DEVICES, LN2, LOG2E, dot, soft_cap, upcast
from kernels.launch import Launcher, num_sms

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
DTYPES = ("float32", "float16", "bfloat16")
MAX_GROUP = 16
CAPABILITIES = Capabilities(
    dtypes=DTYPES,
    devices=DEVICES,
    head_dims=HEAD_DIMS,
    kv_dtypes=(*DTYPES, "float8_e4m3fn"),
    max_group=MAX_GROUP,
    graph_safe=True,
    returns_lse=True,
    softcap=True,
    takes_out=True,
)
INTERPRETED_SMS = 132
"""So that splits are taken in the interpreter as on a card."""

SPLIT_TOKENS = 512
"""Fewest keys worth a program of their own."""


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Launch parameters. block_m: packed queries of a tile; block_n: keys of a tile; pack_heads: a
    tile holds all query heads of a KV head; head_fast: neighbouring programs differ in head, else
    in tile; splits: programs to a tile, None = chosen from the step's lengths."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    pack_heads: bool = True
    head_fast: bool = False
    splits: int | None = None


@dataclass(slots=True, eq=False)
class ExtendPlan:
    """A step's rows, or those of them with min_tokens or more and fewer than below_tokens new
    tokens. rounds: how many times splits may fill the device. Tables are made when a layer first
    needs them."""

    query_starts: Tensor
    context_lens: Tensor
    host_context_lens: Sequence[int] | None
    num_tokens: int | None
    min_tokens: int = 1
    below_tokens: int = NO_LIMIT
    rounds: int = 2
    tiles: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    forms: set[Form] = field(default_factory=set)  # of arguments that were checked

    def table(self, num_tokens: int, pack: int, block_m: int) -> Tensor:
        """The tile table for `num_tokens` packed tokens; see make_tiles."""
        key = num_tokens, pack, block_m
        if key not in self.tiles:
            starts, lens = self.query_starts, self.context_lens
            limits = self.min_tokens, self.below_tokens
            self.tiles[key] = make_tiles(starts, lens, *key, *limits)
        return self.tiles[key]


@triton.jit
def _slots(p_row, positions, last, PAGE: tl.constexpr):
    """Slots of positions, those past `last` replaced by it."""
    positions = tl.minimum(positions, last)
    return tl.load(p_row + positions // PAGE).to(tl.int64) * PAGE + positions % PAGE


@triton.jit
def _sweep(
    b_acc, b_max, b_sum, b_slots, b_q, b_position, p_k, p_v, p_row,
    begin, end, last, stride_slot, scale, softcap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend to keys begin .. end; b_slots are the first tile's."""
    i_n = tl.arange(0, BLOCK_N)
    i_d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        o_kv = b_slots[:, None] * stride_slot + i_d[None, :]
        if BLOCK_D == HEAD_DIM:
            b_k = tl.load(p_k + o_kv).to(b_q.dtype)
            b_v = tl.load(p_v + o_kv).to(b_q.dtype)
        else:
            b_k = tl.load(p_k + o_kv, mask=i_d[None, :] < HEAD_DIM, other=0.0).to(b_q.dtype)
            b_v = tl.load(p_v + o_kv, mask=i_d[None, :] < HEAD_DIM, other=0.0).to(b_q.dtype)
        b_s = tl.zeros([b_q.shape[0], BLOCK_N], tl.float32)
        b_s = dot(b_q, tl.trans(b_k), b_s, UPCAST) * scale
        if softcap is not None:
            b_s = soft_cap(b_s, softcap) * LOG2E
        if MASKED:
            distance = b_position[:, None] - (start + i_n)[None, :]
            seen = distance >= 0
            if WINDOW > 0:
                seen = seen & (distance < WINDOW)
            b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = b_new
        if MASKED:
            b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_old = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_acc = dot(b_p.to(b_q.dtype), b_v, b_acc * b_old[:, None], UPCAST)
        b_max = b_new
        b_slots = _slots(p_row, start + BLOCK_N + i_n, last, PAGE)
    return b_acc, b_max, b_sum, b_slots


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["p_table", "p_starts", "p_context"],
)
def _extend_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_table, p_tiles, p_starts, p_context,
    stride_q, stride_head, stride_slot, stride_table, num_tiles, num_rows, num_tokens,
    scale, softcap, v_scale,
    HEADS: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, HEAD_FAST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The grid's second axis counts the programs among which a tile's keys are divided."""
    if HEAD_FAST:
        i_tile = tl.program_id(0) // (HEADS // PACK)
        i_block = tl.program_id(0) % (HEADS // PACK)
    else:
        i_tile = tl.program_id(0) % num_tiles
        i_block = tl.program_id(0) // num_tiles
    row = tl.load(p_tiles + i_tile * 2)
    first = tl.load(p_tiles + i_tile * 2 + 1)
    if row < 0:
        return
    q_begin = tl.load(p_starts + row)
    q_end = tl.load(p_starts + row + 1, mask=row < num_rows, other=num_tokens)
    context = tl.load(p_context + row, mask=row < num_rows, other=0)
    num_packed = (q_end - q_begin) * PACK
    prefix = context - (q_end - q_begin)
    i_packed = first + tl.arange(0, BLOCK_M)
    b_valid = i_packed < num_packed
    i_packed = tl.minimum(i_packed, num_packed - 1)
    b_token = (q_begin + i_packed // PACK).to(tl.int64)
    b_head = i_block * PACK + i_packed % PACK
    b_position = prefix + i_packed // PACK
    i_d = tl.arange(0, BLOCK_D)
    o_q = (b_token * stride_q + b_head * stride_head)[:, None] + i_d[None, :]
    b_q = tl.load(p_q + o_q, mask=i_d[None, :] < HEAD_DIM, other=0.0)

    # Keys [free, diagonal) are seen by all queries of the tile, [begin, end) by any of them.
    nearest = prefix + first // PACK
    farthest = prefix + (tl.minimum(first + BLOCK_M, num_packed) - 1) // PACK
    # What lies before the window may have been given to other rows: begin at its very first key.
    end = tl.maximum(farthest + 1, 0)
    begin = 0
    free = 0
    if WINDOW > 0:
        begin = tl.maximum(nearest - WINDOW + 1, 0)
        free = tl.maximum(farthest - WINDOW + 1, begin)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), tl.num_programs(1)) * BLOCK_N
        begin = begin + tl.program_id(1) * share
        end = tl.minimum(begin + share, end)
    free = tl.minimum(begin + tl.cdiv(tl.maximum(free - begin, 0), BLOCK_N) * BLOCK_N, end)
    whole = tl.maximum(tl.minimum(nearest + 1, end) - free, 0) // BLOCK_N
    diagonal = free + whole * BLOCK_N

    i_kv = (i_block * PACK // GROUP) * HEAD_DIM
    p_k += i_kv
    p_v += i_kv
    last = tl.maximum(context - 1, 0)
    p_row = p_table + tl.minimum(row, num_rows - 1).to(tl.int64) * stride_table
    b_slots = _slots(p_row, begin + tl.arange(0, BLOCK_N), last, PAGE)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW > 0:
        b_acc, b_max, b_sum, b_slots = _sweep(
            b_acc, b_max, b_sum, b_slots, b_q, b_position, p_k, p_v, p_row,
            begin, free, last, stride_slot, scale, softcap,
            True, WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, UPCAST,
        )  # fmt: skip
    # A query that sees nothing in [begin, free) yet sees all of these keys: its maximum is finite.
    b_acc, b_max, b_sum, b_slots = _sweep(
        b_acc, b_max, b_sum, b_slots, b_q, b_position, p_k, p_v, p_row,
        free, diagonal, last, stride_slot, scale, softcap,
        False, WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, UPCAST,
    )  # fmt: skip
    b_acc, b_max, b_sum, b_slots = _sweep(
        b_acc, b_max, b_sum, b_slots, b_q, b_position, p_k, p_v, p_row,
        diagonal, end, last, stride_slot, scale, softcap,
        True, WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, UPCAST,
    )  # fmt: skip

    b_seen = b_sum > 0.0
    b_out = b_acc * tl.where(b_seen, v_scale / tl.where(b_seen, b_sum, 1.0), 0.0)[:, None]
    o_pair = b_token * HEADS + b_head
    if SPLIT:
        o_pair += tl.program_id(1).to(tl.int64) * num_tokens * HEADS
    o_out = o_pair[:, None] * HEAD_DIM + i_d[None, :]
    mask = b_valid[:, None] & (i_d[None, :] < HEAD_DIM)
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=mask)
    if p_lse is not None:
        b_lse = tl.where(b_seen, b_max + tl.log2(tl.where(b_seen, b_sum, 1.0)), float("-inf"))
        tl.store(p_lse + o_pair, b_lse if SPLIT else b_lse * LN2, mask=b_valid)


def plan_extend(rows: Rows) -> ExtendPlan:
    """Metadata for `extend`. Of the host's lengths only their sums steer it, and only speed depends
    on them."""
    lens, total = rows.host_context_lens, sum(rows.host_query_lens)
    return ExtendPlan(rows.query_starts, rows.context_lens, lens, total, rounds=rounds_of(rows))


def rounds_of(rows: Rows) -> int:
    """How many times a step's programs should fill the device: a kernel that runs beside this one
    needs room on each multiprocessor."""
    return 1 if rows.beside else 2


@declare(CAPABILITIES, plan=plan_extend)
def extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int | None = None,
    *,
    plan: ExtendPlan | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
    config: ExtendConfig | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each row's new tokens over its cached prefix and, causally, themselves.

    q [T, Hq, D] fp32, fp16 or bf16, packed row by row: row i's tokens are query_starts[i] ..
    query_starts[i + 1] (int32 [N + 1]), the last of its context_lens[i] (int32 [N]) tokens, which
    the caches [num_pages, page_size, Hkv, D] hold already; page_table int32 [N, max_pages]. window:
    see that many latest positions, itself included; softcap: scores become softcap * tanh(scores /
    softcap). K is k_scale times the cache, V likewise; scale, k_scale > 0. out, lse: where to
    write, contiguous [T, Hq, D] and float32 [T, Hq]; a plan of some rows leaves the others' alone.
    Returns like q, accumulated in fp32, and with return_lse the natural log-sum-exp of the scores.
    A query that sees nothing and packed tokens beyond the last row have output 0, log-sum-exp -inf.
    Raises ValueError for what it cannot take."""
    arguments = (q, k_cache, v_cache, page_table, context_lens, query_starts)
    form = extend_form(*arguments)
    plan = plan or ExtendPlan(query_starts, context_lens, None, None)
    if form not in plan.forms:
        check_extend(CAPABILITIES, *arguments)
        plan.forms.add(form)
    require(scale > 0 and k_scale > 0, "scale, k_scale", "> 0", (scale, k_scale))
    check_window(window)
    check_softcap(softcap)
    out = result_like("out", out, q, q.shape, q.dtype)
    if return_lse or lse is not None:
        lse = result_like("lse", lse, q, q.shape[:2], torch.float32)
    factors = scale, None if softcap is None else float(softcap), k_scale, float(v_scale)
    attend(form, arguments, plan, factors, window, config, out, lse)
    return (out, lse) if return_lse else out


extend.in_graph = extend  # type: ignore[attr-defined]  # not known yet where it is declared


def attend(
    form: Form,
    tensors: tuple[Tensor, ...],
    plan: ExtendPlan,
    factors: tuple[float, float | None, float, float],
    window: int | None,
    config: ExtendConfig | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`extend` with arguments that were checked. tensors: the first six; factors: scale, softcap,
    k_scale, v_scale."""
    q = tensors[0]
    if q.shape[0]:
        config = config or _default_config(q.dtype, q.shape[2])
        _launch(form[0], tensors, plan, factors, window, config, out, lse)


# Its compiled forms, as Triton itself keeps them.
_run_extend = Launcher(_extend_kernel)


def _launch(
    form: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    plan: ExtendPlan,
    factors: tuple[float, float | None, float, float],
    window: int | None,
    config: ExtendConfig,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    q, k_cache, v_cache, page_table = tensors[:4]
    scale, softcap, k_scale, v_scale = factors
    num_tokens, heads, head_dim = q.shape
    group = heads // k_cache.shape[2]
    pack = group if config.pack_heads else 1
    tiles = plan.table(num_tokens, pack, config.block_m)
    num_tiles, num_blocks = tiles.shape[0], heads // pack
    splits = config.splits or _num_splits(plan, num_tiles * num_blocks, window, q.device)
    part, part_lse = out, lse
    if splits > 1:
        part = q.new_empty((splits, *q.shape), dtype=torch.float32)
        part_lse = q.new_empty((splits, num_tokens, heads), dtype=torch.float32)

    def constants() -> dict[str, Any]:
        return {
            "HEADS": heads, "PACK": pack, "GROUP": group, "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n, "PAGE": k_cache.shape[1], "WINDOW": window or 0,
            "SPLIT": splits > 1, "HEAD_FAST": config.head_fast, "UPCAST": upcast(q.dtype),
        }  # fmt: skip

    aligned = out.data_ptr() % 16, 0 if lse is None else lse.data_ptr() % 16
    key = form, config, window, splits > 1, softcap is None, lse is None, aligned
    # Softmax in base 2; a soft cap is applied to natural scores.
    unit = 1.0 if softcap is not None else LOG2E.value
    _run_extend(
        key,
        (num_tiles * num_blocks, splits),
        (
            *(q, k_cache, v_cache, part, part_lse, page_table, tiles),
            *(plan.query_starts, plan.context_lens, q.stride(0), q.stride(1), k_cache.stride(1)),
            *(page_table.stride(0), num_tiles, plan.context_lens.shape[0], num_tokens),
            *(float(scale * k_scale * unit), softcap, v_scale),
        ),
        constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        merge_splits(key, part, part_lse, out, lse)


def _num_splits(plan: ExtendPlan, programs: int, window: int | None, device: torch.device) -> int:
    """A power of two: as many as about fill the device plan.rounds times, none where the context is
    short."""
    if plan.host_context_lens is None:
        return 1
    longest = max(plan.host_context_lens, default=0)
    longest = longest if window is None else min(longest, window)
    splits = min(
        MAX_SPLITS,
        round(plan.rounds * num_sms(device, on_cpu=INTERPRETED_SMS) / max(programs, 1)),
        longest // SPLIT_TOKENS,
    )
    return 1 << max(splits, 1).bit_length() - 1


@lru_cache(maxsize=64)
def _default_config(dtype: torch.dtype, head_dim: int) -> ExtendConfig:
    if dtype == torch.float32:
        return ExtendConfig(16, 32, num_warps=8, num_stages=2)
    if triton.next_power_of_2(head_dim) > 128:
        return ExtendConfig(64, 32, num_warps=8, num_stages=2)
    return ExtendConfig()
