"""Query and key norms, rotary embedding and the store of K and V into the paged cache, in one
launch.

Works in place on the packed output of the QKV GEMM, [T, Hq + 2 Hkv, D]: query heads, then key
heads, then value heads. Rotary embedding: arXiv:2104.09864. Norms as in transformers: normalised in
float32, rounded, multiplied by the weight, rounded. The rotation is computed in float32 and rounded
once, where torch's chain of operations in a half type rounds three times.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_runs, require
from kernels.jit import INTERPRETED, await_inputs
from kernels.launch import Launcher, form_of, type_of
from kernels.pinned import Choice, Shape, choose

EXACT_CASTS: tl.constexpr = tl.constexpr(not INTERPRETED)
"""The interpreter's cast to float8 loses the carry of a rounding into the exponent."""

FP8_LIMIT: tl.constexpr = tl.constexpr(448.0)
"""Largest finite float8_e4m3fn."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FEW_TOKENS = 512
MANY, FEW = "rotary_store", "rotary_store_few"
"""Names of the pinned entries, for more than FEW_TOKENS tokens and for as many or fewer."""


@dataclass(frozen=True, slots=True)
class RotaryStoreConfig:
    """heads: of one token that a program takes, a power of two. num_warps: of a program."""

    heads: int = 8
    num_warps: int = 2


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """Where K and V go: caches [num_slots, Hkv, D], contiguous over heads, in a dtype
    that qkv may have or float8_e4m3fn; slots int64 [T], one below 0 stores nothing. A float8 cache
    holds K / k_scale and V / v_scale, clamped to its range; scales are finite and above 0."""

    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@triton.jit(do_not_specialize_on_alignment=["p_slots"])
def rotary_store_kernel(
    p_qkv,
    p_cos,
    p_sin,
    p_q_norm,
    p_k_norm,
    p_k_cache,
    p_v_cache,
    p_slots,
    token_stride,
    cos_stride,
    sin_stride,
    slot_stride,
    eps,
    k_scale,
    v_scale,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token, block of heads), flattened: blocks fastest. A head's D elements are held as
    two halves that rotate into each other: elements i and i + D / 2, or 2 i and 2 i + 1."""
    await_inputs(EARLY)
    BLOCKS: tl.constexpr = (NUM_Q + 2 * NUM_KV + HEADS - 1) // HEADS
    # Each block of heads is all queries, all keys or all values, and skips what others need.
    # Branching off the float8 division as well made it a third slower.
    NARROW: tl.constexpr = p_k_cache.dtype.element_ty == tl.float8e4nv
    APART: tl.constexpr = NUM_Q % HEADS + NUM_KV % HEADS == 0 and not NARROW
    WORKS: tl.constexpr = HAS_NORM or HAS_ROPE
    first_head = tl.program_id(0) % BLOCKS * HEADS
    i_head = first_head + tl.arange(0, HEADS)
    is_k = (i_head >= NUM_Q) & (i_head < NUM_Q + NUM_KV)
    is_v = (i_head >= NUM_Q + NUM_KV) & (i_head < NUM_Q + 2 * NUM_KV)
    is_qk = i_head < NUM_Q + NUM_KV
    used = i_head < NUM_Q + 2 * NUM_KV
    if not WORKS:
        used = used & (i_head >= NUM_Q)
    o_heads = i_head * (2 * HALF)
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    slot = tl.load(p_slots + token)
    p_heads = p_qkv + token * token_stride + o_heads
    b_a, b_b = _load_halves(p_heads, used, HALF, BLOCK_HALF, INTERLEAVED)
    if WORKS and (not APART or first_head < NUM_Q + NUM_KV):
        b_new_a, b_new_b = b_a, b_b
        if HAS_NORM:
            b_new_a, b_new_b = _head_norm(
                b_a, b_b, p_q_norm, p_k_norm, (i_head < NUM_Q)[:, None], eps,
                HALF, INTERLEAVED, p_qkv.dtype.element_ty,
            )  # fmt: skip
        if HAS_ROPE:
            b_cos = _row(p_cos + token * cos_stride, 1, b_a, HALF)
            b_sin = _row(p_sin + token * sin_stride, 1, b_a, HALF)
            b_turned = b_new_a * b_cos - b_new_b * b_sin
            b_new_b = b_new_b * b_cos + b_new_a * b_sin
            b_new_a = b_turned
        b_a = tl.where(is_qk[:, None], b_new_a, b_a)
        b_b = tl.where(is_qk[:, None], b_new_b, b_b)
    b_a, b_b = b_a.to(p_qkv.dtype.element_ty), b_b.to(p_qkv.dtype.element_ty)
    if WORKS:
        if INTERLEAVED:
            tl.debug_barrier()  # halves may sit in other threads than the loaded elements
        _store_halves(p_heads, b_a, b_b, is_qk, HALF, BLOCK_HALF, INTERLEAVED)
    if not APART or first_head >= NUM_Q:
        b_c, b_d = _cached(b_a, b_b, tl.where(is_v, v_scale, k_scale), p_k_cache)
        p_k = p_k_cache + slot * slot_stride + (o_heads - NUM_Q * 2 * HALF)
        p_v = p_v_cache + slot * slot_stride + (o_heads - (NUM_Q + NUM_KV) * 2 * HALF)
        stored_k, stored_v = is_k & (slot >= 0), is_v & (slot >= 0)
        _store_halves(p_k, b_c, b_d, stored_k, HALF, BLOCK_HALF, INTERLEAVED)
        _store_halves(p_v, b_c, b_d, stored_v, HALF, BLOCK_HALF, INTERLEAVED)


@triton.jit
def _load_halves(
    p_heads, used, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The two halves of each head in float32, [heads, BLOCK_HALF], 0 outside."""
    if INTERLEAVED:
        i_all = tl.arange(0, 2 * BLOCK_HALF)
        mask = used[:, None] & (i_all < 2 * HALF)[None, :]
        b_all = tl.load(p_heads[:, None] + i_all[None, :], mask=mask, other=0.0).to(tl.float32)
        b_a, b_b = tl.split(tl.reshape(b_all, [b_all.shape[0], BLOCK_HALF, 2]))
    else:
        i_pair = tl.arange(0, BLOCK_HALF)
        mask = used[:, None] & (i_pair < HALF)[None, :]
        p_a = p_heads[:, None] + i_pair[None, :]
        b_a = tl.load(p_a, mask=mask, other=0.0).to(tl.float32)
        b_b = tl.load(p_a + HALF, mask=mask, other=0.0).to(tl.float32)
    return b_a, b_b


@triton.jit
def _store_halves(
    p_heads, b_a, b_b, used, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        i_all = tl.arange(0, 2 * BLOCK_HALF)
        b_all = tl.reshape(tl.join(b_a, b_b), [b_a.shape[0], 2 * BLOCK_HALF])
        mask = used[:, None] & (i_all < 2 * HALF)[None, :]
        tl.store(p_heads[:, None] + i_all[None, :], b_all, mask=mask)
    else:
        i_pair = tl.arange(0, BLOCK_HALF)
        mask = used[:, None] & (i_pair < HALF)[None, :]
        p_a = p_heads[:, None] + i_pair[None, :]
        tl.store(p_a, b_a, mask=mask)
        tl.store(p_a + HALF, b_b, mask=mask)


@triton.jit
def _head_norm(
    b_a, b_b, p_q_norm, p_k_norm, is_q, eps, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Both halves of each head normalised together and weighted: float32, rounded to DTYPE."""
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else HALF
    b_scale = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, axis=1) / (2 * HALF) + eps)[:, None]
    b_q, b_k = _row(p_q_norm, STEP, b_a, HALF), _row(p_k_norm, STEP, b_a, HALF)
    b_a = ((b_a * b_scale).to(DTYPE).to(tl.float32) * tl.where(is_q, b_q, b_k)).to(DTYPE)
    p_q_norm, p_k_norm = p_q_norm + SECOND, p_k_norm + SECOND
    b_q, b_k = _row(p_q_norm, STEP, b_b, HALF), _row(p_k_norm, STEP, b_b, HALF)
    b_b = ((b_b * b_scale).to(DTYPE).to(tl.float32) * tl.where(is_q, b_q, b_k)).to(DTYPE)
    return b_a.to(tl.float32), b_b.to(tl.float32)


@triton.jit
def _row(p_row, STEP: tl.constexpr, b_like, HALF: tl.constexpr):
    """The same HALF elements, every STEP-th, for each head: float32 shaped as b_like, 0 outside.
    Loaded as a tile, for a row's layout would have to be converted to the tile's."""
    i_pair = tl.broadcast_to(tl.arange(0, b_like.shape[1])[None, :], b_like.shape)
    return tl.load(p_row + i_pair * STEP, mask=i_pair < HALF, other=0.0).to(tl.float32)


@triton.jit
def _cached(b_a, b_b, b_scale, p_cache):
    """Both halves in the cache's type; b_scale: of each head, where that is float8."""
    if p_cache.dtype.element_ty == tl.float8e4nv:
        b_a, b_b = _quantised(b_a, b_scale[:, None]), _quantised(b_b, b_scale[:, None])
    else:
        b_a, b_b = b_a.to(p_cache.dtype.element_ty), b_b.to(p_cache.dtype.element_ty)
    return b_a, b_b


@triton.jit
def _quantised(b_x, b_scale):
    """x / scale as float8_e4m3fn: the nearest in range; NaN stays NaN, as in a wider cache."""
    b_x = tl.div_rn(b_x.to(tl.float32), tl.broadcast_to(b_scale, b_x.shape))
    b_x = tl.where(b_x > FP8_LIMIT, FP8_LIMIT, b_x)
    b_x = tl.where(b_x < -FP8_LIMIT, -FP8_LIMIT, b_x)
    if not EXACT_CASTS:
        # Adding 1.5 * 2^20 times its power of two rounds x to 4 significant bits, or to 2^-9.
        b_power = (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        b_shift = tl.maximum(b_power, 0.015625) * 1572864.0
        b_x = (b_x + b_shift) - b_shift
    return b_x.to(tl.float8e4nv)


_run = Launcher(rotary_store_kernel)
_accepted: dict[tuple[object, ...], int] = {}
"""Forms of arguments that were checked, and their KV heads: the same come again in every layer."""


def rotary_store(
    qkv: Tensor,
    num_q_heads: int,
    target: StoreTarget,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    config: RotaryStoreConfig | None = None,
) -> None:
    """Norm and rotate q and k inside qkv [T, Hq + 2 Hkv, D], and store K and V at target.slots.

    qkv float32, float16 or bfloat16, heads contiguous, tokens may be strided. cos, sin [T, D / 2],
    None = no rotation. norms: weights [D] of q and of k, None = no norm. interleaved: elements 2 i
    and 2 i + 1 rotate into each other, else i and i + D / 2. Raises ValueError if it cannot."""
    form = _form(qkv, num_q_heads, target, cos, sin, norms)
    num_kv_heads = _accepted.get(form)
    if num_kv_heads is None:
        num_kv_heads = _check(qkv, num_q_heads, target, cos, sin, norms)
        _accepted[form] = num_kv_heads
    num_tokens, num_heads, head_dim = qkv.shape
    if not num_tokens:
        return
    if config is None:
        counts = (num_q_heads, num_kv_heads, head_dim)
        few = num_tokens <= FEW_TOKENS
        config = pinned_choice(qkv.device, counts, target.k_cache.dtype, few).config
    chosen = config
    q_norm, k_norm = norms or (qkv, qkv)
    cosines, sines = (qkv, qkv) if cos is None or sin is None else (cos, sin)
    rotates = cosines is not qkv
    _run(
        (form, chosen, interleaved),
        (num_tokens * -(-num_heads // chosen.heads), 1),
        (
            *(qkv, cosines, sines, q_norm, k_norm, target.k_cache, target.v_cache, target.slots),
            *(qkv.stride(0), cosines.stride(0), sines.stride(0), target.k_cache.stride(0)),
            # An int would compile a kernel of its own, under the key of an equal float.
            *(float(eps), float(target.k_scale), float(target.v_scale)),
        ),
        lambda: {
            "NUM_Q": num_q_heads,
            "NUM_KV": num_kv_heads,
            "HALF": head_dim // 2,
            "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
            "HEADS": chosen.heads,
            "HAS_NORM": norms is not None,
            "HAS_ROPE": rotates,
            "INTERLEAVED": interleaved,
        },
        num_warps=chosen.num_warps,
    )


def _form(
    qkv: Tensor,
    num_q_heads: int,
    target: StoreTarget,
    cos: Tensor | None,
    sin: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
) -> tuple[object, ...]:
    """All that checks and compilation depend on."""
    caches, slots = (target.k_cache, target.v_cache), target.slots
    return (
        *form_of(qkv, cos, sin, *caches, *(norms or ())),
        *type_of(slots),
        *(num_q_heads, target.k_scale, target.v_scale, None if norms is None else len(norms)),
        len(caches[0]) == len(caches[1]),
        *(one is None or one.shape[:1] == qkv.shape[:1] for one in (cos, sin, slots)),
        *(one.shape for one in norms or ()),
    )


@lru_cache
def pinned_choice(
    device: torch.device, counts: tuple[int, int, int], cache_dtype: torch.dtype, few: bool
) -> Choice[RotaryStoreConfig]:
    """The measured configuration for (query heads, KV heads, head_dim), else the default."""
    num_q_heads, num_kv_heads, head_dim = counts
    default = default_config(num_q_heads + 2 * num_kv_heads, triton.next_power_of_2(head_dim // 2))
    shape = Shape(head_dim, str(cache_dtype).removeprefix("torch."), 1, num_q_heads // num_kv_heads)
    choice = choose(FEW if few else MANY, device, shape, [default], lambda _: 0)
    most = triton.next_power_of_2(num_q_heads + 2 * num_kv_heads)
    heads = min(choice.config.heads, most)
    return replace(choice, config=replace(choice.config, heads=heads))


def default_config(num_heads: int, block_half: int) -> RotaryStoreConfig:
    """Heads that make a tile of 512 pairs, and one 16-byte access of each half to a thread."""
    heads = max(1, min(triton.next_power_of_2(num_heads), 512 // block_half))
    warps = max(1, heads * block_half // 256)
    return RotaryStoreConfig(heads, warps)


def _check(
    qkv: Tensor,
    num_q_heads: int,
    target: StoreTarget,
    cos: Tensor | None,
    sin: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
) -> int:
    """Refuse what the kernel cannot take. Returns the number of KV heads."""
    require(qkv.dim() == 3, "qkv", "[tokens, heads, head_dim]", tuple(qkv.shape))
    num_tokens, num_heads, head_dim = qkv.shape
    require(qkv.dtype in DTYPES, "qkv dtype", "float32, float16 or bfloat16", qkv.dtype)
    holds = head_dim % 2 == 0 and 2 <= head_dim <= 256
    require(holds, "head_dim", "even, in 2 .. 256", head_dim)
    dense = "contiguous over heads and elements"
    require(qkv.stride()[1:] == (head_dim, 1), "qkv strides", dense, qkv.stride())
    stored = num_heads - num_q_heads
    rule = ">= 0 and less than all heads, with as many key as value heads after them"
    holds = num_q_heads >= 0 and stored > 0 and stored % 2 == 0
    require(holds, "num_q_heads", rule, num_q_heads)
    tables = [None if one is None else tuple(one.shape) for one in (cos, sin)]
    require(tables.count(None) != 1, "cos and sin", "both given or both None", tables)
    if norms is not None:
        require(len(norms) == 2, "norms", "weights of q and of k", f"{len(norms)} of them")
    require(target.slots.dtype == torch.int64, "slots dtype", "int64", target.slots.dtype)
    for name, cache in (("k_cache", target.k_cache), ("v_cache", target.v_cache)):
        require(cache.dim() == 3, name, "[slots, heads, head_dim]", tuple(cache.shape))
        holds = cache.shape[1:] == (stored // 2, head_dim)
        require(holds, name, f"[slots, {stored // 2}, {head_dim}]", tuple(cache.shape))
        require(cache.stride()[1:] == (head_dim, 1), f"{name} strides", dense, cache.stride())
        kinds = (*DTYPES, torch.float8_e4m3fn)
        require(cache.dtype in kinds, f"{name} dtype", f"one of {kinds}", cache.dtype)
        _same_device(name, cache, qkv)
    shapes = [tuple(cache.shape) for cache in (target.k_cache, target.v_cache)]
    require(shapes[0] == shapes[1], "v_cache", f"shaped as k_cache {shapes[0]}", shapes[1])
    same = target.k_cache.dtype == target.v_cache.dtype
    require(same, "v_cache dtype", str(target.k_cache.dtype), target.v_cache.dtype)
    same = target.k_cache.stride() == target.v_cache.stride()
    require(same, "v_cache strides", str(target.k_cache.stride()), target.v_cache.stride())
    for name, scale in (("k_scale", target.k_scale), ("v_scale", target.v_scale)):
        require(0 < scale < math.inf, name, "finite and > 0", scale)
    _check_rows("slots", target.slots, (num_tokens,), qkv)
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            _check_rows(name, table, (num_tokens, head_dim // 2), qkv)
    for name, weight in zip(("q_norm", "k_norm"), norms or (), strict=False):
        _check_rows(name, weight, (head_dim,), qkv)
    check_runs(qkv)
    return stored // 2


def _check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], qkv: Tensor) -> None:
    require(tuple(tensor.shape) == shape, name, f"of shape {shape}", tuple(tensor.shape))
    require(tensor.stride(-1) == 1, f"{name} strides", "1 in the last dimension", tensor.stride())
    _same_device(name, tensor, qkv)


def _same_device(name: str, tensor: Tensor, qkv: Tensor) -> None:
    require(tensor.device == qkv.device, f"{name} device", str(qkv.device), str(tensor.device))
