"""Attention over a paged KV pool in plain PyTorch: the reference of every kernel, and the CPU
backend.

PagedAttention (arXiv:2309.06180) without a custom kernel: the slots that a query may see are
gathered into a dense workspace, and torch's scaled_dot_product_attention does the rest. Only slots
of real context are read, so stale values beyond a row's length cannot leak. What all layers share
is computed once, in `plan`.

Shapes: N rows, T packed query tokens, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head_dim, C
context. Caches are [num_pages, page_size, Hkv, D]; a token's slot is table[row, pos // page_size] *
page_size + pos % page_size in 64 bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.declare import Capabilities, Rows, declare

GROUP_SLOTS = 1536
"""Slots gathered at a time in decode: few enough that K and V are still in a core's cache when
read."""

CAPABILITIES = Capabilities(
    dtypes=("float32", "float16", "bfloat16"), devices=("cpu", "cuda"), address="table"
)


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
    plan: DecodePlan | None = None,
) -> Tensor:
    """One query token a row over its context. q [N, Hq, D] in the caches' dtype; page_table [N,
    max_pages] int32; context_lens [N] int32, tokens a row sees, its own included. window: see that
    many latest positions, itself included; None = all. plan: from `plan_decode`; without it the
    lengths are read back from the device. Returns like q, accumulated in fp32."""
    if plan is None:
        plan = _plan_decode(page_table, context_lens.tolist(), k_cache.shape[1])
    groups = _decode_groups(plan, window, q)
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    width = num_kv_heads * head_dim
    keys, values = k_cache.view(-1, width), v_cache.view(-1, width)
    k_space, v_space = _workspace(plan, width, q)
    queries = q.index_select(0, plan.order)
    queries = queries.view(num_rows, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    out = torch.empty_like(queries)
    for group in groups:
        count = group.end - group.begin
        shape = (count, group.context, num_kv_heads, head_dim)
        gathered_k, gathered_v = k_space[: len(group.slots)], v_space[: len(group.slots)]
        torch.index_select(keys, 0, group.slots, out=gathered_k)
        torch.index_select(values, 0, group.slots, out=gathered_v)
        out[group.begin : group.end] = scaled_dot_product_attention(
            queries[group.begin : group.end],  # the G heads of a KV head stand as its G queries
            gathered_k.view(shape).transpose(1, 2),
            gathered_v.view(shape).transpose(1, 2),
            attn_mask=group.mask.expand(count, 1, queries.shape[2], group.context),
            scale=scale,
        )
    return out.view(num_rows, num_q_heads, head_dim).index_select(0, plan.inverse)


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
    plan: ExtendPlan | None = None,
) -> Tensor:
    """New tokens of each row over cached prefix and themselves, causal. q [T, Hq, D], packed row by
    row: row i's are query_starts[i] .. query_starts[i + 1] (int32 [N + 1]), the last tokens of its
    context. The rest as for `paged_decode`."""
    if plan is None:
        query_lens = query_starts.diff().tolist()
        plan = ExtendPlan(page_table, context_lens.tolist(), query_lens, k_cache.shape[1])
    if window not in plan.rows:
        plan.rows[window] = _extend_rows(plan, window, q)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    out = torch.empty_like(q)
    for row in plan.rows[window]:
        out[row.begin : row.end] = scaled_dot_product_attention(
            q[row.begin : row.end].transpose(0, 1).unsqueeze(0),
            keys.index_select(0, row.slots).transpose(0, 1).unsqueeze(0),
            values.index_select(0, row.slots).transpose(0, 1).unsqueeze(0),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k_cache.shape[2],
        )[0].transpose(0, 1)
    return out


def _plan_decode(table: Tensor, context_lens: Sequence[int], page_size: int) -> DecodePlan:
    ascending = sorted(range(len(context_lens)), key=context_lens.__getitem__)
    order = _on_device(ascending, table.device)
    lengths = [context_lens[row] for row in ascending]
    return DecodePlan(table.index_select(0, order), lengths, page_size, order, torch.argsort(order))


def _decode_groups(plan: DecodePlan, window: int | None, q: Tensor) -> list[DecodeGroup]:
    if window in plan.groups:
        return plan.groups[window]
    lengths = plan.context_lens
    visible = [length if window is None else min(length, window) for length in lengths]
    groups = []
    begin = 0
    for end in _group_ends(visible):
        firsts = [lengths[i] - visible[i] for i in range(begin, end)]
        groups.append(_decode_group(plan, firsts, visible[begin:end], begin, q))
        begin = end
    plan.groups[window] = groups
    return groups


def _group_ends(visible: Sequence[int]) -> list[int]:
    """Cut rows in ascending length into groups of at most GROUP_SLOTS slots, padding included."""
    ends, begin = [], 0
    for index, length in enumerate(visible):
        if index > begin and (index + 1 - begin) * length > GROUP_SLOTS:
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
        length = plan.query_lens[index]
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
    host = torch.tensor(values, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _workspace(plan: DecodePlan, width: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the largest group's K and V, reused by every group and layer of the step."""
    rows = max(len(group.slots) for groups in plan.groups.values() for group in groups)
    if plan.workspace is None or plan.workspace[0].shape != (rows, width):
        plan.workspace = (q.new_empty(rows, width), q.new_empty(rows, width))
    return plan.workspace
