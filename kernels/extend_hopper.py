"""Launches the Gluon kernels of kernels/extend_gluon.py and kernels/extend_paired.py."""

from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.extend_gluon import pipelined_kernel
from kernels.extend_paired import paired_kernel
from kernels.extend_tma import DenseConfig, Work, descriptor_types
from kernels.launch import Launcher

KERNELS = {"pipelined": pipelined_kernel, "paired": paired_kernel}
# Compiled forms, as Triton itself keeps them.
_run = {form: Launcher(kernel) for form, kernel in KERNELS.items()}


def launch(work: Work, config: DenseConfig) -> None:
    """Attend."""
    num_tiles = work.tiles.shape[0]
    _run[config.form](
        (work.key, config),
        (num_tiles * work.heads // config.heads, 1),
        (
            *(*work.descriptors(_descriptor, config), work.out, work.lse, work.tiles),
            *(work.query_starts, work.context_lens, work.regions),
            *(num_tiles, _block_heads(work, config), work.scale, work.v_scale),
        ),
        lambda: constants(config, work.heads, work.group, work.direct),
        num_warps=config.num_warps,
    )


def constants(config: DenseConfig, heads: int, group: int, direct: bool) -> dict[str, Any]:
    """The kernel's constants, in its order."""
    values = {"HEADS": heads, "GROUP": group, "STAGES": config.num_stages, "DIRECT": direct}
    return values | {"NUM_WARPS": config.num_warps}


def _block_heads(work: Work, config: DenseConfig) -> int:
    """Query heads whose keys and values, of all long rows, fit config.kv_bytes; at least those of
    one KV head."""
    head_bytes = 2 * work.keys.shape[0] * work.q.shape[2] * work.keys.itemsize
    return work.group * max(1, min(work.heads // work.group, config.kv_bytes // head_bytes))


def compiled(
    capability: int,
    type_name: str,
    head_dim: int,
    config: DenseConfig,
    direct: bool = False,
    heads: int = 32,
    group: int = 4,
):
    """As kernels.extend_tma.compiled, for the Gluon kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    values = constants(config, heads, group, direct) | {"p_lse": None}
    layout = f",{_layout(head_dim, 16)!r}"
    kernel = KERNELS[config.form]
    types, attributes = descriptor_types(kernel, type_name, head_dim, config, values, layout)
    source = GluonASTSource(kernel, types, values, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": config.num_warps})


def _descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, _layout(block[1], 8 * tensor.itemsize))


def _layout(head_dim: int, bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, head_dim * bits // 8), bits, 2)
