"""Launches the Gluon kernels of kernels/extend_gluon.py."""

from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.extend_gluon import pipelined_kernel, specialised_kernel
from kernels.extend_tma import DenseConfig, Work, descriptor_types
from kernels.launch import Launcher

# Compiled forms, as Triton itself keeps them.
_run_pipelined = Launcher(pipelined_kernel)
_run_specialised = Launcher(specialised_kernel)


def launch(work: Work, config: DenseConfig, num_programs: int) -> None:
    """Attend; num_programs: resident programs, of the specialised form."""
    specialised = config.form == "specialised"
    num_tiles = work.tiles.shape[0]
    items = num_tiles * work.heads
    run = _run_specialised if specialised else _run_pipelined
    run(
        (work.key, config),
        (min(items, num_programs) if specialised else items, 1),
        (
            *(*work.descriptors(_descriptor, config), work.out, work.lse, work.tiles),
            *(work.query_starts, work.context_lens, work.regions),
            *(items if specialised else num_tiles, work.scale, work.v_scale),
        ),
        lambda: constants(config, work.heads, work.group, work.direct),
        num_warps=config.num_warps,
    )


def constants(config: DenseConfig, heads: int, group: int, direct: bool) -> dict[str, Any]:
    """The kernel's constants, in its order."""
    head_fast = {} if config.form == "specialised" else {"HEAD_FAST": config.head_fast}
    values = {"HEADS": heads, "GROUP": group, "STAGES": config.num_stages, **head_fast}
    return {**values, "DIRECT": direct, "NUM_WARPS": config.num_warps}


def compiled(
    capability: int,
    type_name: str,
    head_dim: int,
    config: DenseConfig,
    direct: bool = False,
    heads: int = 32,
    group: int = 4,
):
    """As kernels.extend_tma.compiled, for the Gluon kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = specialised_kernel if config.form == "specialised" else pipelined_kernel
    values = constants(config, heads, group, direct) | {"p_lse": None}
    layout = f",{_layout(head_dim, 16)!r}"
    types, attributes = descriptor_types(kernel, type_name, head_dim, config, values, layout)
    source = GluonASTSource(kernel, types, values, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": config.num_warps})


def _descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, _layout(block[1], 8 * tensor.itemsize))


def _layout(head_dim: int, bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, head_dim * bits // 8), bits, 2)
