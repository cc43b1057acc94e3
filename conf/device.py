"""Turns `device: auto` into a device, without importing torch where there is no GPU."""

import importlib
import sys
from pathlib import Path

from core.errors import ConfigError

GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def resolve_device(wanted: str) -> str:
    """`cpu`, `cuda` or `cuda:N`. Raises ConfigError for a GPU that is not there."""
    if wanted == "cpu":
        return "cpu"
    present = sys.platform == "win32" or any(Path(driver).exists() for driver in GPU_DRIVERS)
    devices = importlib.import_module("torch").cuda.device_count() if present else 0
    if wanted == "auto":
        return "cuda" if devices else "cpu"
    index = int(wanted.partition(":")[2] or 0)
    if index >= devices:
        raise ConfigError(f"device must be cpu or one of {devices} CUDA devices, got {wanted!r}")
    return wanted
