"""Refuses to start with engine.deterministic where a part cannot hold it."""

from collections.abc import Callable, Mapping
from typing import Any

from core.config import require
from plugins.executor.sampling import SamplingKernels
from plugins.shared.model_protocols import AttentionQuery

FIELD = "engine.deterministic"


def check_model(model: Any, sampling: SamplingKernels | None) -> None:
    """Raise ConfigError unless the model declares `batch_invariant` and sampling is by kernels on
    a GPU, whose draws do not depend on the batch."""
    holds = getattr(model, "batch_invariant", False)
    rule = "false for a model whose layer operations do not declare batch_invariant"
    require(holds, FIELD, f"{rule} ({type(model).__name__} {model.name})", True)
    by_kernels = sampling is not None or str(model.device) == "cpu"
    require(by_kernels, FIELD, "false where ops.sampling is torch's on a GPU", True)


def checked(build: Callable[[AttentionQuery], Any]) -> Callable[[AttentionQuery], Any]:
    """`build`, which raises ConfigError unless all kernels of its backend declare one and the same
    reduction order."""

    def build_and_check(query: AttentionQuery) -> Any:
        backend = build(query)
        facts = backend.describe()
        parts = [part for part in ("decode", "extend", "shared") if part in facts]
        orders = [_order(facts[part]) for part in parts]
        rule = f"false unless {' and '.join(f'attention.{part}' for part in parts)} declare one"
        holds = len(parts) >= 2 and orders[0] is not None and len(set(orders)) == 1
        found = f"{rule} reduction_order; {facts.get('name')} has {', '.join(map(repr, orders))}"
        require(holds, FIELD, found, True)
        return backend

    return build_and_check


def _order(part: Any) -> Any:
    capabilities = part.get("capabilities") if isinstance(part, Mapping) else None
    return capabilities.get("reduction_order") if isinstance(capabilities, Mapping) else None
