"""Attention over a paged KV pool in plain PyTorch: the reference of every kernel, and the CPU
backend.

PagedAttention (arXiv:2309.06180) without a custom kernel: the slots that a query may see are
gathered into a dense workspace, and torch's scaled_dot_product_attention does the rest; with a soft
cap or a log-sum-exp to return, attention is written out in float32 instead. Only slots of real
context are read, so stale values beyond a row's length cannot leak. What all layers share is
computed once, in `plan`.

Both kernels take besides the positional arguments the keywords plan (what their plan function made
of the step's Rows; without it the lengths are read back from the device), softcap (scores become
softcap * tanh(scores / softcap) after scaling, before masking), k_scale and v_scale (K and V are
these times the cache, whose dtype may differ from q's) and return_lse (also return the natural
log-sum-exp of each row's scores, float32 [T, Hq]). A query that sees no position has output 0 and
log-sum-exp -inf.

Shapes: N rows, T packed query tokens, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head_dim, C
context. Caches are [num_pages, page_size, Hkv, D]; a token's slot is table[row, pos // page_size] *
page_size + pos % page_size in 64 bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.check import (
    check_contiguous,
    check_int32,
    check_shapes,
    check_softcap,
    check_window,
    require,
)
from kernels.declare import Capabilities, Rows, declare

GROUP_SLOTS = 1536
"""Slots gathered at a time in decode: few enough that K and V are still in a core's cache when
read."""

CAPABILITIES = Capabilities(
    dtypes=("float32", "float16", "bfloat16"),
    devices=("cpu", "cuda"),
    kv_dtypes=("float32", "float16", "bfloat16", "float8_e4m3fn"),
    kv_capability={},
    returns_lse=True,
    softcap=True,
)

Out = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made: scale (k_scale included), soft cap, the factor of V."""

    scale: float
    softcap: float | None
    v_scale: float
    written: bool
    """Attention written out, because torch's kernel has neither a soft cap nor a log-sum-exp."""


@dataclass(slots=True)
class DecodeGroup:
    """Rows of similar length: begin..end in the plan's order, their slots [end - begin, C]
    flattened, and the additive mask [end - begin, 1, 1, C] that hides the padding of the shorter
    ones."""

    begin: int
    end: int
    context: int
    slots: Tensor
    mask: Tensor


@dataclass(slots=True)
class ExtendRow:
    """One row: its packed queries begin..end, the slots [C] they may see between them, and the
    additive mask [end - begin, C], or None when plain causal masking says the same."""

    begin: int
    end: int
    slots: Tensor
    mask: Tensor | None


@dataclass(slots=True)
class DecodePlan:
    """A step's rows of one token. groups and workspaces are made once for each window in use."""

    page_table: Tensor  # [N, max_pages], rows in ascending order of context, as all below
    context_lens: Sequence[int]
    page_size: int
    order: Tensor
    inverse: Tensor
    num_empty: int  # leading rows without context
    groups: dict[int | None, list[DecodeGroup]] = field(default_factory=dict)
    workspace: tuple[Tensor, Tensor] | None = None


@dataclass(slots=True)
class ExtendPlan:
    """A step's rows of several tokens. rows are made once for each window in use."""

    page_table: Tensor
    context_lens: Sequence[int]
    query_lens: Sequence[int]
    page_size: int
    rows: dict[int | None, list[ExtendRow]] = field(default_factory=dict)


def plan_decode(rows: Rows) -> DecodePlan:
    """Metadata for `paged_decode`."""
    assert all(length == 1 for length in rows.host_query_lens), "decode rows have one token each"
    return _plan_decode(rows.page_table, rows.host_context_lens, rows.page_size)


def plan_extend(rows: Rows) -> ExtendPlan:
    """Metadata for `paged_extend`."""
    lens = rows.host_context_lens, rows.host_query_lens
    return ExtendPlan(rows.page_table, *lens, rows.page_size)


@declare(CAPABILITIES, plan=plan_decode)
def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    plan: DecodePlan | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> Out:
    """One query token a row over its context. q [N, Hq, D]; page_table [N, max_pages] int32;
    context_lens [N] int32, tokens a row sees, its own included. window: see that many latest
    positions, itself included; None = all. Returns like q, accumulated in fp32 (and log-sum-exp).
    Raises ValueError for shapes or dtypes that do not fit; with a plan, on the first layer only."""
    if plan is None or window not in plan.groups:
        _check(q, k_cache, v_cache, page_table, context_lens, window)
        require(len(q) == len(page_table), "q", f"{len(page_table)} rows", len(q))
    if plan is None:
        plan = _plan_decode(page_table, context_lens.tolist(), k_cache.shape[1])
    groups = _decode_groups(plan, window, q)
    check_softcap(softcap)
    scoring = Scoring(scale * k_scale, softcap, v_scale, softcap is not None or return_lse)
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    width = num_kv_heads * head_dim
    keys, values = k_cache.view(-1, width), v_cache.view(-1, width)
    spaces = _workspace(plan, width, k_cache)
    queries = q.index_select(0, plan.order)
    queries = queries.view(num_rows, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    out = torch.empty_like(queries)
    lse = queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
    if plan.num_empty:
        out[: plan.num_empty] = 0
    for group in groups:
        part = slice(group.begin, group.end)
        shape = (group.end - group.begin, group.context, num_kv_heads, head_dim)
        k, v = (space[: len(group.slots)] for space in spaces)
        torch.index_select(keys, 0, group.slots, out=k)
        torch.index_select(values, 0, group.slots, out=v)
        k, v = (x.view(shape).transpose(1, 2).to(q.dtype) for x in (k, v))
        mask = group.mask.expand(shape[0], 1, queries.shape[2], group.context)
        # The G heads of a KV head stand as its G queries.
        out[part] = _attend(queries[part], k, v, mask, scoring, lse[part] if return_lse else None)
    out = out.view(num_rows, num_q_heads, head_dim).index_select(0, plan.inverse)
    if not return_lse:
        return out
    return out, lse.view(num_rows, num_q_heads).index_select(0, plan.inverse)


@declare(CAPABILITIES, plan=plan_extend)
def paged_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int | None = None,
    *,
    plan: ExtendPlan | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> Out:
    """New tokens of each row over cached prefix and themselves, causal. q [T, Hq, D], packed row by
    row: row i's are query_starts[i] .. query_starts[i + 1] (int32 [N + 1]), the last tokens of its
    context. Packed tokens beyond the last row's have output 0. The rest as for `paged_decode`."""
    if plan is None or window not in plan.rows:
        _check(q, k_cache, v_cache, page_table, context_lens, window)
        check_int32("query_starts", query_starts, 1)
        rule = f"{len(page_table) + 1} long"
        require(len(query_starts) == len(page_table) + 1, "query_starts", rule, len(query_starts))
    if plan is None:
        query_lens = query_starts.diff().tolist()
        plan = ExtendPlan(page_table, context_lens.tolist(), query_lens, k_cache.shape[1])
    if window not in plan.rows:
        plan.rows[window] = _extend_rows(plan, window, q)
    check_softcap(softcap)
    scoring = Scoring(scale * k_scale, softcap, v_scale, softcap is not None or return_lse)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for row in plan.rows[window]:
        part = slice(row.begin, row.end)
        k, v = (x.index_select(0, row.slots).transpose(0, 1) for x in (keys, values))
        k, v = (x.to(q.dtype).unsqueeze(0) for x in (k, v))
        queries = q[part].transpose(0, 1).unsqueeze(0)
        sums = lse[part].t().unsqueeze(0) if return_lse else None
        out[part] = _attend(queries, k, v, row.mask, scoring, sums)[0].transpose(0, 1)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, lse: Tensor | None
) -> Tensor:
    """q [B, H, L, D] over k, v [B, Hkv, C, D]; mask additive, None = causal with L = C. Fills lse
    [B, H, L] where given."""
    gqa = q.shape[1] != k.shape[1]
    if not scoring.written:
        causal, scale = mask is None, scoring.scale
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
        )
        return out if scoring.v_scale == 1.0 else out * scoring.v_scale
    if gqa:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.float().transpose(2, 3) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if mask is None:
        positions = torch.arange(q.shape[2], device=q.device)
        mask = _causal_mask(positions, positions, None, torch.float32)
    scores += mask
    log_sum = scores.logsumexp(-1)
    if lse is not None:
        lse.copy_(log_sum)
    weights = torch.exp(scores - log_sum.unsqueeze(-1))
    return (weights @ v.float() * scoring.v_scale).to(q.dtype)


def _plan_decode(table: Tensor, context_lens: Sequence[int], page_size: int) -> DecodePlan:
    ascending = sorted(range(len(context_lens)), key=context_lens.__getitem__)
    order = _on_device(ascending, table.device)
    lengths = [context_lens[row] for row in ascending]
    inverse = torch.argsort(order)
    table = table.index_select(0, order)
    return DecodePlan(table, lengths, page_size, order, inverse, lengths.count(0))


def _decode_groups(plan: DecodePlan, window: int | None, q: Tensor) -> list[DecodeGroup]:
    if window in plan.groups:
        return plan.groups[window]
    lengths = plan.context_lens
    visible = [length if window is None else min(length, window) for length in lengths]
    groups = []
    begin = plan.num_empty
    for end in _group_ends(visible, begin):
        firsts = [lengths[i] - visible[i] for i in range(begin, end)]
        groups.append(_decode_group(plan, firsts, visible[begin:end], begin, q))
        begin = end
    plan.groups[window] = groups
    return groups


def _group_ends(visible: Sequence[int], begin: int) -> list[int]:
    """Cut rows from `begin`, in ascending length, into groups of at most GROUP_SLOTS slots, padding
    included."""
    if begin == len(visible):
        return []
    ends = []
    for index in range(begin + 1, len(visible)):
        if (index + 1 - begin) * visible[index] > GROUP_SLOTS:
            ends.append(index)
            begin = index
    return [*ends, len(visible)]


def _decode_group(
    plan: DecodePlan, firsts: list[int], visible: list[int], begin: int, q: Tensor
) -> DecodeGroup:
    count, context = len(visible), max(visible)
    first = _on_device(firsts, q.device).unsqueeze(1)
    length = _on_device(visible, q.device).unsqueeze(1)
    offset = torch.arange(context, device=q.device)
    padding = offset >= length
    # A padded place re-reads the row's first visible slot: real data, hidden by the mask.
    positions = first + torch.where(padding, 0, offset)
    slots = _slots(plan.page_table[begin : begin + count], positions, plan.page_size)
    mask = torch.zeros(padding.shape, dtype=q.dtype, device=q.device)
    mask = mask.masked_fill_(padding, -torch.inf).view(count, 1, 1, context)
    return DecodeGroup(begin, begin + count, context, slots.flatten(), mask)


def _extend_rows(plan: ExtendPlan, window: int | None, q: Tensor) -> list[ExtendRow]:
    rows, begin = [], 0
    for index, context in enumerate(plan.context_lens):
        begin += max(0, plan.query_lens[index] - context)  # queries without context see nothing
        length = min(plan.query_lens[index], context)
        if length == 0:
            continue
        first = 0 if window is None else max(0, context - length - window + 1)
        positions = torch.arange(first, context, device=q.device)
        slots = _slots(plan.page_table[index : index + 1], positions.unsqueeze(0), plan.page_size)
        mask = None
        if length < context or (window is not None and window < context):
            queries = torch.arange(context - length, context, device=q.device)
            mask = _causal_mask(queries, positions, window, q.dtype)
        rows.append(ExtendRow(begin, begin + length, slots.flatten(), mask))
        begin += length
    return rows


def _causal_mask(
    queries: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """[queries, positions]: 0 where the query sees the position, else -inf."""
    distance = queries.unsqueeze(1) - positions
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, -torch.inf)


def _slots(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """int64 slots of positions [n, C] in rows of table [n, max_pages]."""
    pages = table.gather(1, positions // page_size).to(torch.int64)
    return pages * page_size + positions % page_size


def _on_device(values: list[int], device: torch.device) -> Tensor:
    """int64 on the device; through pinned memory on CUDA, so that planning does not wait for it."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _workspace(plan: DecodePlan, width: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the largest group's K and V, reused by every group and layer of the step."""
    groups = (group for groups in plan.groups.values() for group in groups)
    rows = max((len(group.slots) for group in groups), default=0)
    if plan.workspace is None or plan.workspace[0].shape != (rows, width):
        plan.workspace = (cache.new_empty(rows, width), cache.new_empty(rows, width))
    return plan.workspace


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    window: int | None,
) -> None:
    check_shapes(CAPABILITIES, q, k_cache, v_cache, page_table, context_lens)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_contiguous(name, cache)
    check_window(window)
