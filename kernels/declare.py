"""What a kernel can serve, declared beside it, and how it plans a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits of one attention kernel. None = any.

    head_dims, page_sizes: the values it takes. dtypes, devices: names such as "bfloat16" and
    "cuda". address: how it finds a token's slot: "table" (block table) or "slots" (flat list with
    offsets). graph_safe: fixed grids and device-side lengths, so that a CUDA graph may capture it.
    batch_invariant: a row's result does not depend on the rows beside it, bit for bit. returns_lse:
    it also returns the log-sum-exp of each row's scores."""

    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    address: str = "table"
    graph_safe: bool = False
    batch_invariant: bool = False
    returns_lse: bool = False


def declare(capabilities: Capabilities, plan: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Attach `capabilities` and `plan` to a kernel, as attributes of those names.

    plan(page_table, context_lens, query_lens, page_size) runs once a step on the rows of the
    kernel's kind; what it returns reaches every layer's call as the keyword `plan`. See
    kernels/torch_reference.py."""

    def attach(kernel: F) -> F:
        kernel.capabilities = capabilities  # type: ignore[attr-defined]
        kernel.plan = plan  # type: ignore[attr-defined]
        return kernel

    return attach
