"""Ragged prefill on Hopper: long chunks through tensor-memory (TMA) loads of contiguous K and V.

Pointer loads keep registers and issue slots busy with addresses; TMA needs one thread and no
registers, but only rows that lie in order. So the context of every long chunk is first gathered
from its pages into a workspace, or, where no row has a cached prefix, the new K and V are read
where the model left them. The copy costs a few per cent of the attention over a long chunk; short
rows of the same batch, windows, soft caps, other types and devices take kernels/extend.py.

A row's region of the workspace ends at a multiple of a tile, filled with zeros, so that no tile
holds values of another row. Tiles come longest first from kernels/extend_plan.py."""

from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import extend as plain
from kernels import extend_hopper, extend_tma
from kernels.check import check_device, require, result_like
from kernels.declare import Rows, declare
from kernels.extend import INTERPRETED_SMS, ExtendPlan
from kernels.extend_check import Form, check_extend, extend_form
from kernels.extend_plan import make_slots, make_tiles
from kernels.extend_tma import DenseConfig, Work
from kernels.jit import INTERPRETED, LOG2E
from kernels.launch import Launcher, form_of, num_sms
from kernels.probe import compiles

CAPABILITIES = replace(plain.CAPABILITIES, graph_safe=False, takes_new_kv=True)
DENSE_HEAD_DIMS = (64, 128)
DENSE_DTYPES = (torch.float16, torch.bfloat16)
TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
DEFAULT = DenseConfig("pipelined")
PAIRED = DenseConfig("paired")
PAIRED_PER_SM, PAIRED_ROUNDS = 2, 6
"""Programs that a multiprocessor holds, and how many times they must fill the device to be worth
their size."""
FALLBACK = DenseConfig()
"""Where the device or the compiler does not take the wanted configuration."""


@dataclass(slots=True, eq=False)
class DensePlan:
    """A step's rows: long ones for the dense kernel, the others for the plain one. What all layers
    share is made when the first one needs it: configurations by type and heads, tiles by their
    size, where the long rows' tokens lie, and room for them."""

    rows: Rows
    config: DenseConfig
    num_tokens: int
    has_prefix: bool  # of any long row
    short: ExtendPlan | None
    every: ExtendPlan  # for calls that the dense kernel does not take
    long_lens: list[int]  # new tokens of the long rows
    chosen: dict[tuple[Any, ...], DenseConfig | None] = field(default_factory=dict)
    tiles: dict[int, Tensor] = field(default_factory=dict)
    slots: Tensor | None = None
    regions: Tensor | None = None
    workspace: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)
    forms: set[Form] = field(default_factory=set)  # of arguments that were checked
    described: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)

    def read(self) -> dict[str, Any]:
        """How many rows are long, in which form they were served, and how many tokens their
        workspace holds."""
        forms = {config.form if config else "plain" for config in self.chosen.values()}
        gathered = 0 if self.slots is None else len(self.slots)
        return {"long_rows": len(self.long_lens), "forms": sorted(forms), "gathered": gathered}


@triton.jit
def _gather_kernel(
    p_k, p_v, p_slots, p_k_out, p_v_out, stride_slot,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Copy slots' K and V [WIDTH] to rows of the workspace, zeros where there is none."""
    i_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    slots = tl.load(p_slots + i_row)
    mask = (slots >= 0)[:, None] & (i_w < WIDTH)[None, :]
    o_in = slots[:, None] * stride_slot + i_w[None, :]
    o_out = i_row.to(tl.int64)[:, None] * WIDTH + i_w[None, :]
    b_k = tl.load(p_k + o_in, mask=mask, other=0.0)
    b_v = tl.load(p_v + o_in, mask=mask, other=0.0)
    tl.store(p_k_out + o_out, b_k.to(p_k_out.dtype.element_ty), mask=(i_w < WIDTH)[None, :])
    tl.store(p_v_out + o_out, b_v.to(p_v_out.dtype.element_ty), mask=(i_w < WIDTH)[None, :])


def plan_extend(rows: Rows, config: DenseConfig | None = None) -> DensePlan:
    """Metadata for `extend`: rows of config.min_tokens or more new tokens are its long ones. Reads
    the host's lengths, so a captured graph keeps this choice."""
    config = config or DEFAULT
    limit = config.min_tokens
    pairs = list(zip(rows.host_context_lens, rows.host_query_lens, strict=True))
    long = [(context, new) for context, new in pairs if new >= limit]
    if any(new > context for context, new in long):
        long = []  # queries before position 0: the plain kernel alone knows them
    starts, lens, total = rows.query_starts, rows.context_lens, sum(rows.host_query_lens)
    short = None
    if len(long) < len(pairs):
        contexts = [context for context, new in pairs if new < limit]
        rounds = plain.rounds_of(rows)
        short = ExtendPlan(starts, lens, contexts, total, below_tokens=limit, rounds=rounds)
    every = plain.plan_extend(rows)
    has_prefix = any(context > new for context, new in long)
    long_lens = [new for _, new in long]
    return DensePlan(rows, config, total, has_prefix, short, every, long_lens)


@declare(CAPABILITIES, plan=plan_extend, in_graph=plain.extend)
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
    plan: DensePlan | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As kernels.extend.extend, and faster for long chunks on Hopper.

    k_new, v_new [T, Hkv, D]: the packed tokens' K and V in q's dtype, as the caches hold them too,
    tokens strided; they spare a copy where no long row has a cached prefix. Without a plan the
    lengths are read back from the device."""
    arguments = (q, k_cache, v_cache, page_table, context_lens, query_starts)
    form = extend_form(*arguments)
    if plan is None or form not in plan.forms:
        check_extend(CAPABILITIES, *arguments)
    require(scale > 0 and k_scale > 0, "scale, k_scale", "> 0", (scale, k_scale))
    if plan is None:
        plan = plan_extend(_read_rows(q, k_cache, page_table, context_lens, query_starts))
    plan.forms.add(form)
    args = *arguments, scale, window
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    options = {"softcap": softcap, "return_lse": return_lse, **scales}
    wanted = window is None and softcap is None and plan.long_lens
    config = _choose(q, k_cache, plan) if wanted else None
    if config is None:
        return plain.extend(*args, plan=plan.every, out=out, **options)
    out = result_like("out", out, q, q.shape, q.dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    if plan.short is not None:
        short = scale, None, k_scale, float(v_scale)
        plain.attend(form, arguments, plan.short, short, None, None, out, lse)
    elif q.shape[0] > plan.num_tokens:
        _clear_padding(plan.num_tokens, out, lse)
    new, same = None, k_cache.dtype == q.dtype and k_scale == v_scale == 1.0
    if same and not plan.has_prefix and k_new is not None and v_new is not None:
        new = k_new, v_new
        _check_new(arguments[:2], new, plan)
    factors = scale * k_scale * LOG2E.value, float(v_scale)
    _launch(form[0], arguments, new, plan, config, factors, (out, lse))
    return out if lse is None else (out, lse)


def describe(
    device: str, head_dim: int, kv_dtype: str, page_size: int, group: int
) -> dict[str, Any]:
    """Which kernels serve on a device, and their launch parameters, for the manifest. Over a cache
    of 8 bits q is taken to be half precision."""
    del page_size, group
    cache_dtype = getattr(torch, kv_dtype)
    dtype = torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype
    config = asdict(plain._default_config(dtype, head_dim))
    every = {"served_by": "kernels.extend.extend", "configuration": config}
    hopper = device.startswith("cuda") and torch.cuda.get_device_capability(device)[0] == 9
    fits = dtype in DENSE_DTYPES and head_dim in DENSE_HEAD_DIMS
    if not (fits and (hopper or INTERPRETED)):
        return every
    wanted = FALLBACK if INTERPRETED else DEFAULT
    dense = {"configuration": asdict(wanted), "fallback": asdict(FALLBACK)}
    if not INTERPRETED:
        dense["of_much_work"] = asdict(PAIRED)
    return {"served_by": "kernels.extend_dense.extend", **dense, "other_rows": every}


extend.describe = describe  # type: ignore[attr-defined]


def takes_dense(q: Tensor, config: DenseConfig) -> bool:
    """Whether `config` serves queries like q: type and head dim fit, and the kernel compiles for
    the device, which a process of its own tries first."""
    if q.dtype not in DENSE_DTYPES or q.shape[2] not in DENSE_HEAD_DIMS:
        return False
    if INTERPRETED:
        return config.form == "tma"
    # The rows it takes are no part of the variant.
    variant = replace(config, min_tokens=1)
    return _compiles(q.device, TYPE_NAMES[q.dtype], q.shape[2], variant)


def probe(capability: int, type_name: str, head_dim: int, config: dict) -> None:
    """For kernels.probe: raises where the dense kernel does not compile."""
    module = extend_tma if config["form"] == "tma" else extend_hopper
    for direct in (False, True):
        module.compiled(capability, type_name, head_dim, DenseConfig(**config), direct)


@lru_cache(maxsize=64)
def _compiles(device: torch.device, type_name: str, head_dim: int, config: DenseConfig) -> bool:
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return False
    arguments = {"capability": 10 * major + minor, "type_name": type_name, "head_dim": head_dim}
    arguments["config"] = asdict(config)
    return compiles("kernels.extend_dense:probe", arguments)


def choice_key(q: Tensor, k_cache: Tensor) -> tuple[Any, ...]:
    """What a plan's choice of a configuration depends on."""
    return q.dtype, *q.shape[1:], k_cache.shape[2]


def _choose(q: Tensor, k_cache: Tensor, plan: DensePlan) -> DenseConfig | None:
    """The plan's configuration, the paired one in place of the default where there is much to do,
    the fallback, or None: then the plain kernel serves."""
    if q.stride(1) != q.shape[2]:
        return None
    key = choice_key(q, k_cache)
    if key not in plan.chosen:
        fallback = replace(FALLBACK, min_tokens=plan.config.min_tokens)
        wanted = [plan.config, fallback]
        if plan.config is DEFAULT and _much(q, k_cache, plan):
            wanted.insert(0, PAIRED)
        fitting = (config for config in wanted if takes_dense(q, config))
        plan.chosen[key] = next(fitting, None)
    return plan.chosen[key]


def _much(q: Tensor, k_cache: Tensor, plan: DensePlan) -> bool:
    """Whether query heads pair up and such programs fill the device PAIRED_ROUNDS times."""
    heads, group = q.shape[1], q.shape[1] // k_cache.shape[2]
    programs = sum(-(-new // PAIRED.block_m) for new in plan.long_lens) * heads // PAIRED.heads
    rounds = programs / (PAIRED_PER_SM * num_sms(q.device, on_cpu=INTERPRETED_SMS))
    return group % PAIRED.heads == 0 and rounds >= PAIRED_ROUNDS


def _clear_padding(begin: int, out: Tensor, lse: Tensor | None) -> None:
    out[begin:] = 0
    if lse is not None:
        lse[begin:] = -torch.inf


def _read_rows(
    q: Tensor, k_cache: Tensor, page_table: Tensor, context_lens: Tensor, query_starts: Tensor
) -> Rows:
    lens = context_lens.tolist(), query_starts.diff().tolist()
    sizes = k_cache.shape[1], q.shape[1], k_cache.shape[2], q.shape[2]
    return Rows(page_table, context_lens, query_starts, *lens, *sizes)


def _check_new(given: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], plan: DensePlan) -> None:
    """Raise ValueError for new keys or values that the kernel cannot take."""
    q, k_cache = given
    form = form_of(*new), tuple(map(len, new))
    if form in plan.forms:
        return
    shape = (q.shape[0], *k_cache.shape[2:])
    for name, tensor in zip(("k_new", "v_new"), new, strict=True):
        require(tensor.shape == shape, name, f"shaped {shape}", tuple(tensor.shape))
        require(tensor.dtype == q.dtype, f"{name} dtype", str(q.dtype), str(tensor.dtype))
        strides = tensor.stride()
        holds = strides[1:] == (shape[2], 1) and strides[0] % 8 == 0
        require(holds, f"{name} strides", "contiguous heads, 16-byte aligned tokens", strides)
        require(tensor.data_ptr() % 16 == 0, f"{name} address", "aligned to 16 bytes", strides)
        check_device(name, tensor, q)
    plan.forms.add(form)


_run_gather = Launcher(_gather_kernel)


def _gather(
    form: tuple[Any, ...], q: Tensor, caches: tuple[Tensor, ...], plan: DensePlan
) -> tuple[Tensor, ...]:
    """Long rows' K and V [W, Hkv * D] in order; see make_slots. One workspace serves all layers."""
    if plan.slots is None:
        plan.slots, plan.regions = make_slots(plan.rows, plan.config.min_tokens)
    width = caches[0].shape[2] * caches[0].shape[3]
    shape, key = (plan.slots.shape[0], width), (width, q.dtype)
    if key not in plan.workspace:
        plan.workspace[key] = (q.new_empty(shape), q.new_empty(shape))
    keys, values = plan.workspace[key]
    # Triton's own cdiv and next_power_of_2 cost the host several microseconds a call.
    block_w = min(1024, 1 << (width - 1).bit_length())
    block_r = 8
    _run_gather(
        form,
        (shape[0] // block_r, -(-width // block_w)),
        (*caches, plan.slots, keys, values, caches[0].stride(1)),
        lambda: {"WIDTH": width, "BLOCK_W": block_w, "BLOCK_R": block_r},
        num_warps=8,
    )
    return keys, values


def _launch(
    form: tuple[Any, ...],
    arguments: tuple[Tensor, ...],
    new: tuple[Tensor, Tensor] | None,
    plan: DensePlan,
    config: DenseConfig,
    factors: tuple[float, float],
    results: tuple[Tensor, Tensor | None],
) -> None:
    """Attend. new: keys and values to read in place; factors: of scores, in base 2, and of V."""
    q, k_cache = arguments[:2]
    out, lse = results
    rows = plan.rows
    if config.block_m not in plan.tiles:
        count = sum(triton.cdiv(new, config.block_m) for new in plan.long_lens)
        shape = len(q), 1, config.block_m, config.min_tokens
        tiles = make_tiles(rows.query_starts, rows.context_lens, *shape, max_tiles=count)
        plan.tiles[config.block_m] = tiles
    if new is None:
        keys, values = _gather(form, q, arguments[1:3], plan)
    else:
        keys, values = new
    heads, num_kv_heads = q.shape[1], k_cache.shape[2]
    regions = rows.query_starts if new else plan.regions
    of_new = None if new is None else form_of(*new)
    work = Work(
        key=(form, lse is None, of_new),
        q=q, keys=keys, values=values, out=out, lse=lse, tiles=plan.tiles[config.block_m],
        query_starts=rows.query_starts, context_lens=rows.context_lens, regions=regions,
        direct=new is not None, scale=factors[0], v_scale=factors[1], heads=heads,
        group=heads // num_kv_heads, described=plan.described,
    )  # fmt: skip
    if config.form == "tma":
        extend_tma.launch(work, config)
    else:
        extend_hopper.launch(work, config)
