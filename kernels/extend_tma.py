"""Ragged prefill on Hopper: attention over contiguous K and V through tensor-memory (TMA) loads.

TMA needs one thread and no registers, but only rows that lie in order: kernels/extend_dense.py puts
them so. Tiles come longest first from kernels/extend_plan.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.jit import LN2, dot, upcast
from kernels.launch import Launcher


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Launch parameters. form: "tma" (this module), "pipelined" (kernels/extend_gluon.py) or
    "paired" (kernels/extend_paired.py; for an even number of query heads to a KV head).
    block_m: queries of a tile; block_n: keys, a divisor of ALIGN. min_tokens: fewest new tokens of
    a row that takes this path.

    Of "tma" alone: head_fast: neighbouring programs differ in head, else in tile; q_registers: keep
    the queries in registers instead of shared memory; max_registers: a thread's, None = the
    compiler's choice. Of the others: kv_bytes: as many heads at once as have this much K and V, so
    that they stay in the device's cache."""

    form: str = "tma"
    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    head_fast: bool = False
    q_registers: bool = False
    max_registers: int | None = None
    min_tokens: int = 512
    kv_bytes: int = 40 << 20

    @property
    def heads(self) -> int:
        """Query heads of a program."""
        return 2 if self.form == "paired" else 1


@dataclass(slots=True, eq=False)
class Work:
    """One call's launch: tiles of queries over keys and values [tokens, Hkv * D] in order.

    key: of everything that compilation depends on but the configuration. described: the TMA
    descriptors of the plan's earlier calls, to be pointed at this call's tensors. regions: where
    each row's keys begin; direct: they are the packed new tokens', so that regions are the query
    starts and what follows a row's end is not zero. scale: to base-2 scores."""

    key: tuple[Any, ...]
    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    lse: Tensor | None
    tiles: Tensor
    query_starts: Tensor
    context_lens: Tensor
    regions: Tensor
    direct: bool
    scale: float
    v_scale: float
    heads: int
    group: int
    described: dict[tuple[Any, ...], tuple[Any, ...]]

    def descriptors(
        self, describe: Callable[[Tensor, list[int]], Any], config: DenseConfig
    ) -> tuple[Any, ...]:
        """Of q, keys and values. Making one costs the host as much as a launch."""
        key = self.key, config
        known = self.described.get(key)
        if known is None:
            head_dim = self.q.shape[2]
            blocks = config.block_m, config.block_n, config.block_n
            flat = (x.flatten(1) for x in (self.q, self.keys, self.values))
            known = tuple(
                describe(x, [rows, head_dim]) for x, rows in zip(flat, blocks, strict=True)
            )
            self.described[key] = known
        else:
            known[0].base, known[1].base, known[2].base = self.q, self.keys, self.values
        return known


@triton.jit
def _dense_sweep(
    b_acc, b_max, b_sum, b_q, b_position, d_k, d_v, base, column, begin, end, length, scale,
    MASKED: tl.constexpr, DIRECT: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend to keys begin .. end of a row whose K and V begin at row `base` of the tensors."""
    i_n = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        b_k = d_k.load([base + start, column])
        b_s = tl.zeros([b_q.shape[0], BLOCK_N], tl.float32)
        b_s = dot(b_q, tl.trans(b_k), b_s, UPCAST)
        if MASKED:
            b_s = tl.where(b_position[:, None] >= (start + i_n)[None, :], b_s, float("-inf"))
        # scale > 0: the maximum commutes with it, and score * scale - maximum is one operation.
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
        b_p = tl.exp2(b_s * scale - b_new[:, None])
        b_old = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_v = d_v.load([base + start, column])
        if DIRECT and MASKED:
            # What follows the row may be NaN, and 0 x NaN is NaN.
            b_v = tl.where((start + i_n < length)[:, None], b_v, 0.0)
        b_acc = dot(b_p.to(b_q.dtype), b_v, b_acc * b_old[:, None], UPCAST)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit(
    do_not_specialize=["num_tiles"],
    do_not_specialize_on_alignment=["p_starts", "p_context", "p_regions"],
)
def _dense_kernel(
    d_q, d_k, d_v, p_out, p_lse, p_tiles, p_starts, p_context, p_regions,
    num_tiles, scale, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_FAST: tl.constexpr, Q_REGISTERS: tl.constexpr,
    DIRECT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    if HEAD_FAST:
        i_tile = tl.program_id(0) // HEADS
        i_head = tl.program_id(0) % HEADS
    else:
        i_tile = tl.program_id(0) % num_tiles
        i_head = tl.program_id(0) // num_tiles
    row = tl.load(p_tiles + i_tile * 2)
    first = tl.load(p_tiles + i_tile * 2 + 1)
    if row < 0:
        return
    q_begin = tl.load(p_starts + row)
    q_length = tl.load(p_starts + row + 1) - q_begin
    if DIRECT:
        context = q_length
        base = q_begin
    else:
        context = tl.load(p_context + row)
        base = tl.load(p_regions + row)
    nearest = context - q_length + first
    end = tl.minimum(nearest + BLOCK_M, context)
    diagonal = (nearest + 1) // BLOCK_N * BLOCK_N
    b_position = nearest + tl.arange(0, BLOCK_M)
    b_q = d_q.load([q_begin + first, i_head * HEAD_DIM])
    i_d = tl.arange(0, HEAD_DIM)
    if Q_REGISTERS:
        # A product by one leaves the queries in the registers that the next product reads.
        b_one = tl.where(i_d[:, None] == i_d[None, :], 1.0, 0.0).to(b_q.dtype)
        b_q = dot(b_q, b_one, tl.zeros([BLOCK_M, HEAD_DIM], tl.float32), UPCAST).to(b_q.dtype)

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    column = i_head // GROUP * HEAD_DIM
    b_acc, b_max, b_sum = _dense_sweep(
        b_acc, b_max, b_sum, b_q, b_position, d_k, d_v, base, column, 0, diagonal, context, scale,
        False, DIRECT, BLOCK_N, UPCAST,
    )  # fmt: skip
    # Every query sees its first key in the loop above or in this one's first tile.
    b_acc, b_max, b_sum = _dense_sweep(
        b_acc, b_max, b_sum, b_q, b_position, d_k, d_v, base, column, diagonal, end, context, scale,
        True, DIRECT, BLOCK_N, UPCAST,
    )  # fmt: skip

    b_out = b_acc * (v_scale / b_sum)[:, None]
    b_pair = (q_begin + first + tl.arange(0, BLOCK_M)).to(tl.int64) * HEADS + i_head
    b_valid = b_position < context
    o_out = b_pair[:, None] * HEAD_DIM + i_d[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=b_valid[:, None])
    if p_lse is not None:
        tl.store(p_lse + b_pair, (b_max + tl.log2(b_sum)) * LN2, mask=b_valid)


# Compiled forms, as Triton itself keeps them.
_run_dense = Launcher(_dense_kernel)


def launch(work: Work, config: DenseConfig) -> None:
    """Attend."""
    head_dim, cast = work.q.shape[2], upcast(work.q.dtype)
    _run_dense(
        (work.key, config),
        (work.tiles.shape[0] * work.heads, 1),
        (
            *(*work.descriptors(TensorDescriptor.from_tensor, config), work.out, work.lse),
            *(work.tiles, work.query_starts, work.context_lens, work.regions),
            *(work.tiles.shape[0], work.scale, work.v_scale),
        ),
        lambda: _constants(work.heads, work.group, head_dim, config, work.direct, cast),
        **_options(config),
    )


def compiled(
    capability: int,
    type_name: str,
    head_dim: int,
    config: DenseConfig,
    direct: bool = False,
    heads: int = 32,
    group: int = 4,
):
    """The compiled kernel for a CUDA capability such as 90, without a device. type_name: "fp16" or
    "bf16"."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = _constants(heads, group, head_dim, config, direct, False) | {"p_lse": None}
    types, attributes = descriptor_types(_dense_kernel, type_name, head_dim, config, values)
    source = ASTSource(_dense_kernel, types, values, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=_options(config))


def descriptor_types(
    kernel: Any,
    type_name: str,
    head_dim: int,
    config: DenseConfig,
    constants: dict[str, Any],
    layout: str = "",
) -> tuple[dict[str, str], dict[tuple[int], Any]]:
    """(signature, attributes) of a kernel with this module's parameters. layout: of the buffers in
    shared memory, written into the descriptors' types."""
    names = kernel.arg_names
    block_m, block_n = f"{config.block_m},{head_dim}", f"{config.block_n},{head_dim}"
    types = dict.fromkeys(("p_tiles", "p_starts", "p_context", "p_regions"), "*i32")
    types |= {"d_q": f"tensordesc<{type_name}[{block_m}]{layout}>", "p_out": f"*{type_name}"}
    types |= dict.fromkeys(("d_k", "d_v"), f"tensordesc<{type_name}[{block_n}]{layout}>")
    types |= {"num_tiles": "i32", "block_heads": "i32", "scale": "fp32", "v_scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(names) if types[name][0] == "*"}
    return {name: types[name] for name in names}, attributes


def _constants(
    heads: int, group: int, head_dim: int, config: DenseConfig, direct: bool, cast: bool
) -> dict[str, int | bool]:
    return {
        "HEADS": heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HEAD_FAST": config.head_fast,
        "Q_REGISTERS": config.q_registers,
        "DIRECT": direct,
        "UPCAST": cast,
    }


def _options(config: DenseConfig) -> dict[str, int]:
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return options
