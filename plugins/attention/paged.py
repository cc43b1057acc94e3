"""Attention over the paged pool by any pair of kernels: one for rows of one token, one for the
rest.

A kernel is a callable. It may carry attributes (kernels/declare.py sets the first two):
`capabilities`, checked at start; `plan`, called once a step with the `Part` of its rows that is the
kernel's; and `describe`, called for the manifest. Shapes as in core/model_protocols.py; signatures:

    decode(q, k_cache, v_cache, page_table, context_lens, scale, window)
    extend(q, k_cache, v_cache, page_table, context_lens, query_starts, scale, window)
    plan(rows)
    describe(device, head_dim, kv_dtype, page_size, group)

A kernel with a plan receives what it returned as the keyword `plan`; k_scale and v_scale are passed
where the cache holds scaled values. One that declares `takes_out` receives where its result goes as
the keyword `out`; another's is copied there. To an extend kernel q may bring more tokens than
query_starts tells of: padding, whose results count for nothing. One that declares `takes_new_kv`
also receives the new tokens' K and V as k_new and v_new where the cache has q's dtype; from a
narrower cache all reads are of its rounded values, so that results do not depend on how a prompt is
cut. Where a CUDA graph captures a launch, an extend kernel's `in_graph` takes its place, which is
graph_safe, takes `out`, and leaves tokens before query_starts[0] alone; without one none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from core.hookspecs import hookimpl
from plugins.attention.check import Capabilities, check_captured, check_kernel, kernel_name
from plugins.shared.model_protocols import AttentionBatch, AttentionQuery

if TYPE_CHECKING:
    from torch import Tensor  # the kernels bring torch; a run without a device never loads it


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of a launch that one kernel serves, as its plan sees them (kernels.declare.Rows)."""

    page_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    host_context_lens: Sequence[int]
    host_query_lens: Sequence[int]
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    beside: bool  # the other kernel's rows may be served at the same time


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A part, its kernel, and the keywords that this gets in every layer."""

    rows: Part
    kernel: Callable[..., Any]
    options: dict[str, Any]

    @property
    def takes_out(self) -> bool:
        """Whether the kernel takes the keyword out."""
        return getattr(getattr(self.kernel, "capabilities", None), "takes_out", False)


@dataclass(frozen=True, slots=True, eq=False)
class PagedPlan:
    """A launch's metadata: decode is None without one-token rows, extend without longer ones."""

    decode: Planned | None
    extend: Planned | None


class PagedAttention:
    """The plugin: pairs a decode kernel with an extend kernel. name defaults to the decode
    kernel's. shared: decodes in steps whose rows begin with the same pages, None = decode."""

    def __init__(
        self,
        decode: Callable[..., Any],
        extend: Callable[..., Any],
        name: str | None = None,
        shared: Callable[..., Any] | None = None,
    ) -> None:
        self._decode = decode
        self._extend = extend
        self._name = name or kernel_name(decode)
        self._shared = shared

    @hookimpl
    def build_attention(self, query: AttentionQuery) -> PagedBackend:
        """The backend. Raises ConfigError naming what a kernel cannot serve."""
        check_kernel("attention.decode", self._decode, query)
        check_kernel("attention.extend", self._extend, query)
        check_captured("attention.extend.in_graph", self._extend, query)
        if self._shared is not None:
            check_kernel("attention.shared", self._shared, query)
        return PagedBackend(self._name, self._decode, self._extend, query, self._shared)


class PagedBackend:
    """model_protocols.AttentionBackend over two kernels, or three. uses_sharing: it matters
    whether a batch's shares_prefix is right. extends_in_graph: it takes an AttentionBatch whose
    in_graph is set."""

    def __init__(
        self,
        name: str,
        decode: Callable[..., Any],
        extend: Callable[..., Any],
        query: AttentionQuery,
        shared: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self._decode = decode
        self._extend = extend
        self._query = query
        self._shared = shared
        self.uses_sharing = shared is not None
        scaled = query.k_scale != 1.0 or query.v_scale != 1.0
        self._scales = {"k_scale": query.k_scale, "v_scale": query.v_scale} if scaled else {}
        declared: Capabilities | None = getattr(extend, "capabilities", None)
        takes_new_kv = declared is not None and declared.takes_new_kv
        self._takes_new_kv = takes_new_kv and query.kv_dtype == query.dtype
        self._captured = getattr(extend, "in_graph", None)
        self.extends_in_graph = self._captured is not None

    def plan(self, batch: AttentionBatch) -> PagedPlan:
        """Split the rows between the kernels and let each plan its own, once a step."""
        split, num_rows = batch.num_decode_rows, len(batch.host_query_lens)
        one_token = self._decode
        if batch.shares_prefix and self._shared is not None:
            one_token = self._shared
        decode = self._planned(one_token, batch, 0, split) if split else None
        extend = None
        if split < num_rows:
            kernel = self._captured if batch.in_graph else self._extend
            assert kernel is not None, "asked by extends_in_graph"
            extend = self._planned(kernel, batch, split, num_rows)
        return PagedPlan(decode, extend)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: PagedPlan,
        scale: float,
        window: int | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows of one token each: q [num_decode_rows, num_q_heads, head_dim]; returns like q, in
        `out`, contiguous, if that is given."""
        part = plan.decode
        assert part is not None, "the launch has no one-token rows"
        table, lens = part.rows.page_table, part.rows.context_lens
        into = {"out": out} if part.takes_out and out is not None else {}
        options = part.options | into
        found: Tensor = part.kernel(q, k_cache, v_cache, table, lens, scale, window, **options)
        return found if into or out is None else out.copy_(found)

    def extend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: PagedPlan,
        scale: float,
        window: int | None,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The other rows, packed: q [their tokens, num_q_heads, head_dim]; returns like q. k_new,
        v_new [their tokens, num_kv_heads, head_dim] in q's dtype. out: as in decode."""
        part = plan.extend
        assert part is not None, "the launch has no rows of several tokens"
        rows = part.rows
        table, lens, starts = rows.page_table, rows.context_lens, rows.query_starts
        options = part.options
        if self._takes_new_kv and k_new is not None:
            options = options | {"k_new": k_new, "v_new": v_new}
        into = {"out": out} if part.takes_out and out is not None else {}
        found: Tensor = part.kernel(
            q, k_cache, v_cache, table, lens, starts, scale, window, **options, **into
        )
        return found if into or out is None else out.copy_(found)

    def read(self, plan: PagedPlan) -> dict[str, Any]:
        """What the kernels of a launch planned, for records; waits for the device. Of a kernel
        whose plan has no `read`, its name alone."""
        parts = (("decode", plan.decode), ("extend", plan.extend))
        facts = {}
        for name, part in parts:
            if part is not None:
                read = getattr(part.options.get("plan"), "read", None)
                planned = {} if read is None else {"plan": read()}
                facts[name] = {"kernel": kernel_name(part.kernel)} | planned
        return facts

    def describe(self) -> dict[str, Any]:
        """Names, capabilities and chosen configurations of both kernels, for the manifest."""
        kernels = {"decode": self._decode, "extend": self._extend}
        if self._shared is not None:
            kernels["shared"] = self._shared
        if self._captured is not None:
            kernels["extend_in_graph"] = self._captured
        facts = {part: _description(kernel, self._query) for part, kernel in kernels.items()}
        return {"name": self.name, **facts}

    def _planned(
        self, kernel: Callable[..., Any], batch: AttentionBatch, begin: int, end: int
    ) -> Planned:
        starts = batch.query_starts[begin : end + 1]
        rows = Part(
            page_table=batch.page_table[begin:end],
            context_lens=batch.context_lens[begin:end],
            # One-token rows come first, so row `begin`'s tokens start at packed position `begin`.
            query_starts=starts - begin if begin and not batch.in_graph else starts,
            host_context_lens=batch.host_context_lens[begin:end],
            host_query_lens=batch.host_query_lens[begin:end],
            page_size=batch.page_size,
            num_q_heads=self._query.num_q_heads,
            num_kv_heads=self._query.num_kv_heads,
            head_dim=self._query.head_dim,
            beside=end - begin < len(batch.host_query_lens),
        )
        planner = getattr(kernel, "plan", None)
        plan = {} if planner is None else {"plan": planner(rows)}
        return Planned(rows, kernel, plan | self._scales)


def _description(kernel: Callable[..., Any], query: AttentionQuery) -> dict[str, Any]:
    declared: Any = getattr(kernel, "capabilities", None)
    capabilities = "undeclared" if declared is None else asdict(declared)
    facts = {"kernel": kernel_name(kernel), "capabilities": capabilities}
    describe = getattr(kernel, "describe", None)
    if describe is not None:
        group = query.num_q_heads // query.num_kv_heads
        facts |= describe(query.device, query.head_dim, query.kv_dtype, query.page_size, group)
    return facts
