"""Refuses a launch that a kernel cannot take, before it runs: ValueError with field, rule and
value. Needs no Triton, as the reference that shares it."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.declare import Capabilities


def require(holds: bool, field: str, rule: str, value: Any) -> None:
    """Raise ValueError `field must be rule, got value` unless `holds`."""
    if not holds:
        raise ValueError(f"{field} must be {rule}, got {value!r}")


def check_paged(
    limits: Capabilities,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
) -> None:
    """Check what decode and extend share. q [T, Hq, D]; caches [num_pages, page_size, Hkv, D];
    page_table int32 [N, max_pages]; context_lens int32 [N]. Only facts that the host knows: lengths
    and page ids stay on the device."""
    check_shapes(limits, q, k_cache, v_cache, page_table, context_lens)
    head_dim, page_size = q.shape[2], k_cache.shape[1]
    check_page_size(page_size)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_rows(name, tensor)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        # A slot's address is slot * stride, whichever page it lies in.
        rule = "contiguous over pages, slots and heads"
        require(cache.stride()[2:] == (head_dim, 1), f"{name} strides", rule, cache.stride())
        joined = cache.stride(0) == page_size * cache.stride(1) or cache.shape[0] == 1
        require(joined, f"{name} strides", rule, cache.stride())
    require(k_cache.stride() == v_cache.stride(), "v_cache strides", "k_cache's", v_cache.stride())
    check_table(page_table, context_lens)
    for name, tensor in (("page_table", page_table), ("context_lens", context_lens)):
        check_device(name, tensor, q)
    check_device("k_cache", k_cache, q)
    check_device("v_cache", v_cache, q)
    check_runs(q)


def check_shapes(
    limits: Capabilities,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
) -> None:
    """The part of `check_paged` that holds for any attention: shapes, dtypes, declared limits."""
    require(q.dim() == 3, "q", "[tokens, num_q_heads, head_dim]", tuple(q.shape))
    require(k_cache.dim() == 4, "k_cache", "[pages, page_size, heads, dim]", tuple(k_cache.shape))
    require(v_cache.shape == k_cache.shape, "v_cache", "shaped as k_cache", tuple(v_cache.shape))
    head_dim, num_kv_heads, heads = q.shape[2], k_cache.shape[2], q.shape[1]
    require(k_cache.shape[3] == head_dim, "k_cache head_dim", f"q's {head_dim}", k_cache.shape[3])
    _one_of(limits.head_dims, "head_dim", head_dim)
    _one_of(limits.page_sizes, "page_size", k_cache.shape[1])
    require(num_kv_heads >= 1, "k_cache heads", ">= 1", num_kv_heads)
    holds = heads >= 1 and heads % num_kv_heads == 0
    require(holds, "q heads", f"a positive multiple of {num_kv_heads}", heads)
    if limits.max_group is not None:
        rule = f"at most {limits.max_group} query heads to a KV head"
        require(heads // num_kv_heads <= limits.max_group, "group", rule, heads // num_kv_heads)
    _one_of(limits.dtypes, "q dtype", _name(q))
    _one_of(limits.kv_dtypes or (_name(q),), "k_cache dtype", _name(k_cache))
    require(v_cache.dtype == k_cache.dtype, "v_cache dtype", _name(k_cache), _name(v_cache))
    check_int32("page_table", page_table, 2)
    check_int32("context_lens", context_lens, 1)
    rows, max_pages = page_table.shape
    require(max_pages >= 1, "page_table columns", ">= 1", max_pages)
    require(len(context_lens) == rows, "context_lens", f"{rows} long", len(context_lens))


def check_table(page_table: Tensor, context_lens: Tensor) -> None:
    """How a kernel reads page_table [N, max_pages], rows strided, and context_lens [N]."""
    require(page_table.stride(1) == 1, "page_table strides", "1 along a row", page_table.stride())
    check_contiguous("context_lens", context_lens)


def check_page_size(page_size: int) -> None:
    """Kernels divide positions by it."""
    holds = page_size >= 1 and page_size & (page_size - 1) == 0
    require(holds, "page_size", "a power of two", page_size)


def check_window(window: int | None) -> None:
    """None, or how many latest positions are seen: 1 <= window < 2**31."""
    holds = window is None or (isinstance(window, int) and 1 <= window < 2**31)
    require(holds, "window", "None or an integer in 1 .. 2**31 - 1", window)


def check_softcap(softcap: float | None) -> None:
    """None, or finite and above 0."""
    holds = softcap is None or 0 < softcap < math.inf
    require(holds, "softcap", "None or finite and > 0", softcap)


def check_rows(name: str, tensor: Tensor) -> None:
    """Vectors along the last dimension must start at 16-byte boundaries and be contiguous."""
    require(tensor.stride(-1) == 1, f"{name} strides", "1 in the last dimension", tensor.stride())
    size = tensor.element_size()
    aligned = all(s * size % 16 == 0 for s in tensor.stride()[:-1])
    require(aligned, f"{name} strides", f"multiples of {16 // size} elements", tensor.stride())
    rule = "aligned to 16 bytes"
    require(tensor.data_ptr() % 16 == 0, f"{name} address", rule, hex(tensor.data_ptr()))


def check_int32(name: str, tensor: Tensor, dims: int) -> None:
    """An index tensor is int32 with `dims` dimensions."""
    require(tensor.dtype == torch.int32, f"{name} dtype", "int32", _name(tensor))
    require(tensor.dim() == dims, name, f"of {dims} dimensions", tuple(tensor.shape))


def check_column(
    name: str, column: Tensor, length: int, like: Tensor, dtype: torch.dtype | None = None
) -> None:
    """One value for each of `length` rows: [length], contiguous, on like's device; dtype None =
    any."""
    require(column.shape == (length,), name, f"[{length}]", tuple(column.shape))
    if dtype is not None:
        wanted = str(dtype).removeprefix("torch.")
        require(column.dtype == dtype, f"{name} dtype", wanted, _name(column))
    check_contiguous(name, column)
    check_device(name, column, like)


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Kernels index it without strides."""
    require(tensor.is_contiguous(), f"{name} strides", "contiguous", tensor.stride())


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    """Everything lies on q's device."""
    require(tensor.device == q.device, f"{name} device", str(q.device), str(tensor.device))


def check_runs(tensor: Tensor) -> None:
    """A CUDA tensor, or any under the interpreter."""
    from kernels.jit import INTERPRETED  # needs Triton

    rule = "cuda (on a CPU set TRITON_INTERPRET=1 before Triton is imported)"
    require(tensor.is_cuda or INTERPRETED, "device", rule, str(tensor.device))


def _one_of(allowed: tuple[Any, ...] | None, field: str, value: Any) -> None:
    if allowed is not None:
        require(value in allowed, field, f"one of {', '.join(map(str, allowed))}", value)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def result_like(
    name: str, given: Tensor | None, q: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """`given`, where it can hold a result like q but in shape and dtype, or a new tensor. Raises
    ValueError."""
    if given is None:
        return q.new_empty(shape, dtype=dtype)
    like = given.shape == shape and given.dtype == dtype and given.device == q.device
    if like and given.is_contiguous() and given.data_ptr() % 16 == 0:
        return given
    require(given.shape == shape, name, f"of shape {tuple(shape)}", tuple(given.shape))
    require(given.dtype == dtype, f"{name} dtype", str(dtype), str(given.dtype))
    require(given.is_contiguous(), f"{name} strides", "contiguous", given.stride())
    require(given.data_ptr() % 16 == 0, f"{name} address", "aligned to 16 bytes", given.data_ptr())
    check_device(name, given, q)
    return given
