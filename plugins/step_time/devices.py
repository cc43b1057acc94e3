"""Devices as a step's time depends on them: what their data sheets promise.

Sources: NVIDIA's data sheets of the A100 80GB SXM, L4, L40S, H100 SXM, H200 SXM and B200 (bf16
tensor cores without sparsity; NVLink in one direction; the L40S and L4 have PCIe 4.0 x16)."""

from collections.abc import Mapping
from dataclasses import dataclass

from core.config import require


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: bf16 FLOP/s, memory in bytes/s and bytes, link in bytes/s each way."""

    flops: float
    bandwidth: float
    memory_bytes: int
    link: float


DEVICES: Mapping[str, Device] = {
    "h200": Device(989e12, 4.8e12, 141_000_000_000, 450e9),
    "h100": Device(989e12, 3.35e12, 80_000_000_000, 450e9),
    "a100": Device(312e12, 2.039e12, 80_000_000_000, 300e9),
    "b200": Device(2250e12, 8.0e12, 180_000_000_000, 900e9),
    "l40s": Device(362e12, 0.864e12, 48_000_000_000, 32e9),
    "l4": Device(121e12, 0.3e12, 24_000_000_000, 32e9),
}


def device_of(name: str) -> Device:
    """The device of that name. Raises ConfigError for one that is not here."""
    require(name in DEVICES, "step_time.device", f"one of {', '.join(DEVICES)}", name)
    return DEVICES[name]
