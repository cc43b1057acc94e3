"""One packed copy to the device a launch, and results on their way back without waiting."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Every array on the device: int64 for integers and booleans, float64 for floats, shapes kept.

    They travel in one buffer. On CUDA it is pinned, and torch's pinned-memory cache hands it out
    again only when the copy has run, so the caller need not keep it."""
    parts = {name: _words(array) for name, array in arrays.items()}
    total = sum(part.size for part in parts.values())
    host = torch.empty(total, dtype=torch.int64, pin_memory=device.type == "cuda")
    if parts:
        np.concatenate([part.ravel() for part in parts.values()], out=host.numpy())
    packed = host.to(device, non_blocking=True)
    tensors, begin = {}, 0
    for name, part in parts.items():
        tensor = packed[begin : begin + part.size].view(part.shape)
        is_float = arrays[name].dtype.kind == "f"
        tensors[name] = tensor.view(torch.float64) if is_float else tensor
        begin += part.size
    return tensors


def download(tensor: Tensor) -> Tensor:
    """A copy of the tensor in (pinned) host memory once the stream has come so far; keep it until
    then."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _words(array: NDArray[Any]) -> NDArray[np.int64]:
    if array.dtype.kind == "f":
        return np.ascontiguousarray(array, np.float64).view(np.int64)
    return np.ascontiguousarray(array, np.int64)
