"""What the launchers of ragged prefill share: which arguments they refuse, and the form of those
that they accept, so that a plan's later layers need no check."""

from typing import Any

from torch import Tensor

from kernels.check import check_device, check_int32, check_paged, require
from kernels.declare import Capabilities

Form = tuple[Any, ...]


def extend_form(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
) -> Form:
    """All that checks and compilation depend on: devices, types, shapes, strides, alignment."""
    addresses = (
        q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr(),
        page_table.data_ptr() % 16,
        context_lens.data_ptr() % 16,
        query_starts.data_ptr() % 16,
    )
    return (
        *(q.device, q.dtype, q.shape, q.stride()),
        *(k_cache.dtype, k_cache.shape, k_cache.stride(), k_cache.device),
        *(v_cache.dtype, v_cache.shape, v_cache.stride(), v_cache.device),
        *(page_table.dtype, page_table.shape, page_table.stride(), page_table.device),
        *(context_lens.dtype, context_lens.shape, context_lens.stride(), context_lens.device),
        *(query_starts.dtype, query_starts.shape, query_starts.stride(), query_starts.device),
        *(addresses[0] % 16, *addresses[1:]),
    )


def check_extend(
    limits: Capabilities,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
) -> None:
    """Refuse what `extend` cannot take: ValueError naming field, rule and value."""
    check_paged(limits, q, k_cache, v_cache, page_table, context_lens)
    check_int32("query_starts", query_starts, 1)
    check_device("query_starts", query_starts, q)
    rows = len(context_lens)
    rule = f"{rows + 1} long"
    require(len(query_starts) == rows + 1, "query_starts", rule, len(query_starts))
    for name, tensor in (("query_starts", query_starts), ("context_lens", context_lens)):
        require(tensor.is_contiguous(), f"{name} strides", "contiguous", tensor.stride())
