"""Attention in plain PyTorch whose result for a token has the same bits in any batch and however
its context was computed: every new token is a call of its own over a copy of the positions it sees,
so that what a library chooses by shape is the same each time. For a CPU; slow for long prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.check import check_int32, check_shapes, check_softcap, check_window, require
from kernels.declare import Rows, declare
from kernels.torch_reference import CAPABILITIES as REFERENCE
from kernels.torch_reference import DecodePlan, Out, paged_decode, plan_decode

CAPABILITIES = replace(
    REFERENCE, devices=("cpu",), batch_invariant=True, reduction_order=f"{__name__}, token by token"
)


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """A step's rows, and the packed place of each new token that sees something, with a plan of its
    own."""

    rows: Rows
    tokens: list[tuple[int, DecodePlan]] = field(default_factory=list)


def plan_tokens(rows: Rows) -> TokenPlan:
    """Metadata for `decode` and `extend`."""
    plan, place = TokenPlan(rows), 0
    lens = zip(rows.host_context_lens, rows.host_query_lens, strict=True)
    for index, (context, new) in enumerate(lens):
        table = rows.page_table[index : index + 1]
        for seen in range(context - new + 1, context + 1):
            if seen > 0:
                alone = replace(
                    rows, page_table=table, host_context_lens=[seen], host_query_lens=[1]
                )
                plan.tokens.append((place, plan_decode(alone)))
            place += 1
    return plan


@declare(CAPABILITIES, plan=plan_tokens)
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    plan: TokenPlan | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> Out:
    """As kernels.torch_reference.paged_decode."""
    check_shapes(CAPABILITIES, q, k_cache, v_cache, page_table, context_lens)
    require(len(q) == len(context_lens), "q", f"{len(context_lens)} rows", len(q))
    plan = plan or _read(q, k_cache, page_table, context_lens, [1] * len(q))
    options = {"softcap": softcap, "k_scale": k_scale, "v_scale": v_scale}
    return _attend(q, (k_cache, v_cache), (scale, window), plan, options, return_lse)


@declare(CAPABILITIES, plan=plan_tokens)
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
    plan: TokenPlan | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> Out:
    """As kernels.torch_reference.paged_extend."""
    check_shapes(CAPABILITIES, q, k_cache, v_cache, page_table, context_lens)
    check_int32("query_starts", query_starts, 1)
    rule = f"{len(page_table) + 1} long"
    require(len(query_starts) == len(page_table) + 1, "query_starts", rule, len(query_starts))
    new = query_starts.diff().tolist()
    plan = plan or _read(q, k_cache, page_table, context_lens, new)
    options = {"softcap": softcap, "k_scale": k_scale, "v_scale": v_scale}
    return _attend(q, (k_cache, v_cache), (scale, window), plan, options, return_lse)


def _read(
    q: Tensor, k_cache: Tensor, page_table: Tensor, context_lens: Tensor, new: Sequence[int]
) -> TokenPlan:
    starts = torch.tensor([0, *new]).cumsum(0)
    sizes = k_cache.shape[1], q.shape[1], k_cache.shape[2], q.shape[2]
    return plan_tokens(Rows(page_table, context_lens, starts, context_lens.tolist(), new, *sizes))


def _attend(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    scoring: tuple[float, int | None],
    plan: TokenPlan,
    options: dict[str, Any],
    return_lse: bool,
) -> Out:
    """scoring: scale and window."""
    check_window(scoring[1])
    check_softcap(options["softcap"])
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    one = plan.rows.context_lens[:1]  # its value is in the token's own plan
    for place, token in plan.tokens:
        part = slice(place, place + 1)
        # A copy, since a library may follow the alignment of its input too.
        arguments = q[part].clone(), *caches, token.page_table, one, *scoring
        answer = paged_decode(*arguments, plan=token, return_lse=return_lse, **options)
        out[part] = answer[0] if return_lse else answer
        if return_lse:
            lse[part] = answer[1]
    return (out, lse) if return_lse else out
