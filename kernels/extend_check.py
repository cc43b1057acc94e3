"""What the launchers of ragged prefill share: which arguments they refuse, and the form of those
that they accept, so that a plan's later layers need no check."""

from typing import Any

from torch import Tensor

from kernels.check import check_contiguous, check_device, check_int32, check_paged, require
from kernels.declare import Capabilities
from kernels.launch import form_of, type_of

Form = tuple[Any, ...]


def extend_form(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
) -> Form:
    """(what compilation depends on, sizes): together all that checks depend on. The first alone is
    a launch's key: batches differ in their sizes without end."""
    wide, scalar = (q, k_cache, v_cache), (page_table, context_lens, query_starts)
    # The length of a tensor by len() takes the host several times as long.
    return (*form_of(*wide), *type_of(*scalar)), tuple([x.shape[0] for x in (*wide, *scalar)])


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
    check_contiguous("query_starts", query_starts)
