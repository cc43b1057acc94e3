"""What an attention kernel can serve, declared beside it, and how it plans a step.

An attention kernel is a callable, one of

    decode(q, k_cache, v_cache, page_table, context_lens, scale, window)
    extend(q, k_cache, v_cache, page_table, context_lens, query_starts, scale, window)

and, where it declares or carries them, keywords besides: plan (what its `plan` made of the step's
`Rows`), softcap, k_scale and v_scale, return_lse. kernels/torch_reference.py is the reference of
all of them and describes their meaning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, TypeVar, cast

from torch import Tensor

KV_CAPABILITY = {"float8_e4m3fn": 89}
"""Least CUDA capability (89 = 8.9) for which Triton compiles reads of a cache's dtype."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits of one attention kernel. None = any.

    dtypes: of q and the output. kv_dtypes: of the cache, None = the dtype of q alone.
    head_dims, page_sizes: the values it takes; max_group: most query heads to a KV head. devices:
    torch's device types. address: how it finds a token's slot: "table" (block table) or "slots"
    (one flat list of slots with offsets, which its plan makes from the table). graph_safe: fixed
    grids and device-side lengths, so that a CUDA graph may capture plan and call. batch_invariant:
    a row's result does not depend on the rows beside it, bit for bit. reduction_order: a name; of
    kernels that declare the same, a token's result has the same bits, however its context was cut
    into chunks. returns_lse, softcap: it takes these keywords. takes_new_kv: an extend kernel takes
    keywords k_new and v_new, the new tokens' K and V [T, Hkv, D] in q's dtype, tokens strided,
    which the cache holds too. takes_out: it takes the keyword out, a contiguous tensor like q to
    write to and return. kv_capability: least CUDA capability (89 = 8.9) by cache dtype, default
    what Triton needs."""

    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    max_group: int | None = None
    address: str = "table"
    graph_safe: bool = False
    batch_invariant: bool = False
    reduction_order: str | None = None
    returns_lse: bool = False
    softcap: bool = False
    takes_new_kv: bool = False
    takes_out: bool = False
    kv_capability: Mapping[str, int] = field(
        default_factory=lambda: dict(KV_CAPABILITY), hash=False
    )


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A step's N rows of one kind, as a kernel's plan sees them; T packed new tokens.

    page_table int32 [N, max_pages], tails on page 0; context_lens int32 [N]: tokens a row holds,
    its new ones included; query_starts int32 [N + 1]: these are device tensors.
    host_context_lens, host_query_lens [N]: the lengths as integers; a graph-safe kernel reads only
    their number, since a captured graph would keep their values. beside: another kernel may run at
    the same time, so that filling the device once is enough."""

    page_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    host_context_lens: Sequence[int]
    host_query_lens: Sequence[int]
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    beside: bool = False


def load(path: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The kernel `module.name`: a function as it stands, a class (options given) built with them.
    Raises ValueError for a path or an option that does not exist, or options that it refuses."""
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"path must name a kernel (module.name), got {path!r}: {error}") from error
    if options is None:
        kernel = found
    else:
        try:
            kernel = found(**options)
        except TypeError as error:
            raise ValueError(f"options must suit {path}, got {dict(options)!r}: {error}") from error
    if not callable(kernel):
        raise ValueError(f"path must name a callable, got {path!r}")
    return cast(Callable[..., Any], kernel)


def declare(
    capabilities: Capabilities,
    plan: Callable[..., Any] | None = None,
    in_graph: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Attach `capabilities`, `plan` and `in_graph` to a kernel, as attributes of those names.

    plan(rows) runs once a step on the `Rows` of the kernel's kind; what it returns reaches every
    layer's call as the keyword `plan`. in_graph: an extend kernel that takes its place where a CUDA
    graph captures the call: graph_safe, with `out`. It leaves tokens before query_starts[0] alone
    and writes zeros for those after the last row's; rows may have no token and context 0, be more
    than tokens, and say nothing true in their host lengths. An object with these attributes and
    `__call__` is a kernel too."""

    def attach(kernel: F) -> F:
        kernel.capabilities = capabilities  # type: ignore[attr-defined]
        kernel.plan = plan  # type: ignore[attr-defined]
        kernel.in_graph = in_graph  # type: ignore[attr-defined]
        return kernel

    return attach
