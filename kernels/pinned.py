"""Launch parameters for each device and shape, measured beforehand; nothing is tuned while requests
run.

The table is kernels/pinned.json; `python -m experiments.kernels.tune` measures a device and writes
its entries. A shape that was not measured takes those of the nearest one that was (same kernel,
device and head_dim rounded up). On a device that is not in the table the first of the kernel's
candidates that fits its shared memory serves, and a log line says how to measure it."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import triton

C = TypeVar("C")
TABLE = Path(__file__).with_name("pinned.json")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a configuration is chosen by. dtype: of the cache; group: query heads to a KV head."""

    head_dim: int
    dtype: str
    page_size: int
    group: int


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    """A configuration and where it came from: "pinned" (measured for this very shape), "nearest"
    (for the shape named), or "default"."""

    config: C
    source: str
    measured: Shape | None = None

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "configuration": asdict(self.config),  # type: ignore[call-overload]
            "source": self.source,
            "measured_for": None if self.measured is None else asdict(self.measured),
        }


def choose(
    kernel: str,
    device: torch.device,
    shape: Shape,
    candidates: Sequence[C],
    shared_bytes: Callable[[C], int],
) -> Choice[C]:
    """The configuration of `kernel` for `shape`. candidates: dataclasses, best first; shared_bytes:
    what a program of one takes. Raises ValueError if none fits the device."""
    measured = {} if device.type != "cuda" else entries(kernel, torch.cuda.get_device_name(device))
    if measured:
        nearest = min(measured, key=lambda other: _distance(shape, other))
        if _distance(shape, nearest)[0] == 0:
            source = "pinned" if nearest == shape else "nearest"
            config = replace(candidates[0], **measured[nearest])  # type: ignore[type-var]
            return Choice(config, source, nearest)
    if device.type != "cuda":
        return Choice(candidates[0], "default")
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    fitting = [config for config in candidates if shared_bytes(config) <= limit]
    if not fitting:
        raise ValueError(
            f"{kernel} must fit {limit} bytes of shared memory, got {shape} with at least "
            f"{min(map(shared_bytes, candidates))}"
        )
    _say_untuned(kernel, torch.cuda.get_device_name(device))
    return Choice(fitting[0], "default")


def entries(kernel: str, device_name: str) -> dict[Shape, dict[str, Any]]:
    """What was measured for a kernel on a device: launch parameters by shape."""
    return {
        Shape(**entry["shape"]): entry["configuration"]
        for entry in _table()
        if entry["kernel"] == kernel and entry["device"] == device_name
    }


@cache
def _table() -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = json.loads(TABLE.read_text()) if TABLE.exists() else []
    return table


def _distance(shape: Shape, other: Shape) -> tuple[int, ...]:
    """Zero first word: near enough to use. Then what matters most first."""
    dim, other_dim = (triton.next_power_of_2(s.head_dim) for s in (shape, other))
    size, other_size = (_itemsize(s.dtype) for s in (shape, other))
    return (
        int(dim != other_dim or size != other_size),
        int(shape.dtype != other.dtype),
        int((shape.page_size == 1) != (other.page_size == 1)),
        abs(shape.group - other.group),
        abs(shape.page_size - other.page_size),
        abs(shape.head_dim - other.head_dim),
    )


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


@cache
def _say_untuned(kernel: str, device_name: str) -> None:
    logger.warning(
        "no measured configuration of %s for %s: using a default; to measure it: "
        "python -m experiments.kernels.tune",
        kernel,
        device_name,
    )
