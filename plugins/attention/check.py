"""Whether attention kernels can serve what a backend asks of them, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from core.config import require
from plugins.shared.model_protocols import AttentionQuery


class Capabilities(Protocol):
    """What the backend reads of a kernel's declaration (kernels/declare.py)."""

    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    head_dims: tuple[int, ...] | None
    page_sizes: tuple[int, ...] | None
    kv_dtypes: tuple[str, ...] | None
    max_group: int | None
    graph_safe: bool
    takes_new_kv: bool
    takes_out: bool
    kv_capability: Mapping[str, int]


def kernel_name(kernel: Callable[..., Any]) -> str:
    """`module.function` of a kernel."""
    return f"{kernel.__module__}.{getattr(kernel, '__qualname__', type(kernel).__qualname__)}"


def check_kernel(field: str, kernel: Callable[..., Any], query: AttentionQuery) -> None:
    """Raise ConfigError naming the field, the kernel, its limit and the value that is outside it. A
    kernel that declares nothing is taken at its caller's word."""
    declared: Capabilities | None = getattr(kernel, "capabilities", None)
    if declared is None:
        return
    name = kernel_name(kernel)
    device = query.device.partition(":")[0]
    require(
        query.num_q_heads % query.num_kv_heads == 0,
        f"{field}: num_q_heads",
        f"a multiple of num_kv_heads ({query.num_kv_heads})",
        query.num_q_heads,
    )
    kv_dtypes = declared.kv_dtypes or (query.dtype,)
    limits: tuple[tuple[str, tuple[Any, ...] | None, Any], ...] = (
        ("device", declared.devices, device),
        ("dtype", declared.dtypes, query.dtype),
        ("kv_dtype", kv_dtypes, query.kv_dtype),
        ("head_dim", declared.head_dims, query.head_dim),
        ("page_size", declared.page_sizes, query.page_size),
    )
    for what, allowed, value in limits:
        if allowed is not None:
            rule = f"one of {', '.join(map(str, allowed))} for the kernel {name}"
            if (what, value) == ("device", "cpu"):
                rule += " (Triton's run on a CPU with TRITON_INTERPRET=1 in the environment)"
            require(value in allowed, f"{field}: {what}", rule, value)
    needed = declared.kv_capability.get(query.kv_dtype, 0)
    if device == "cuda" and needed:
        rule = f"at least {needed / 10} where kv_dtype is {query.kv_dtype} for the kernel {name}"
        capability = _capability(query.device)
        require(capability >= needed, f"{field}: CUDA capability", rule, capability / 10)
    group = query.num_q_heads // query.num_kv_heads
    if declared.max_group is not None:
        rule = f"at most {declared.max_group} for the kernel {name}"
        require(group <= declared.max_group, f"{field}: query heads to a KV head", rule, group)


def check_captured(field: str, extend: Callable[..., Any], query: AttentionQuery) -> None:
    """Raise ConfigError naming field and kernel if an extend kernel names one to be captured in its
    place that is not graph_safe, takes no `out`, or does not fit."""
    captured = getattr(extend, "in_graph", None)
    if captured is None:
        return
    declared = getattr(captured, "capabilities", None)
    for name in ("graph_safe", "takes_out"):
        rule = f"declared by the kernel {kernel_name(captured)}"
        require(getattr(declared, name, False), f"{field}: {name}", rule, False)
    check_kernel(field, captured, query)


def _capability(device: str) -> int:
    """CUDA capability of a device, 89 = 8.9."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
