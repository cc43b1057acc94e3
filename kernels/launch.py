"""Launches a compiled kernel again without Triton's look-up of what to compile.

Triton specialises a kernel on every argument at every launch, which costs the host more than a
small kernel runs. Attention runs with the same shapes in every layer, so the caller keeps a key of
everything that decides the specialisation, and the second launch with a key goes straight to the
compiled kernel.

A kernel whose last parameter is EARLY is launched, on a Hopper card, before the kernel ahead of it
in the stream has ended, and waits for that on the device (programmatic dependent launch): its
start-up, a large part of a small kernel's time, then costs nothing."""

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from kernels.jit import INTERPRETED


class Launcher:
    """One kernel and its compiled forms. Under the interpreter every launch is a first one."""

    def __init__(self, kernel: Any) -> None:
        """kernel: a jit function whose constants are its last parameters."""
        self._kernel = kernel
        self._waits = getattr(kernel, "arg_names", [""])[-1] == "EARLY"
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...], int]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int],
        arguments: tuple[Any, ...],
        constants: Callable[[], Mapping[str, Any]],
        **options: Any,
    ) -> None:
        """Launch on the current stream. arguments: positional, up to the constants; constants():
        the rest by name but EARLY, in the kernel's order, asked once a key. key must change
        whenever a constant or option does, the device, a tensor's dtype or, where the kernel is
        specialised on them, its 16-byte alignment and an integer's being 1 or a multiple of 16."""
        if not self.again(key, grid, arguments):
            self._first(key, grid, arguments, constants(), options)

    def again(self, key: Hashable, grid: tuple[int, int], arguments: tuple[Any, ...]) -> bool:
        """Launch the form that an earlier launch compiled for `key`; False if there is none.
        arguments may hold addresses instead of tensors, which spares the host their look-up."""
        known = self._compiled.get(key)
        if known is None:
            return False
        compiled, values, device = known
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            # A profiler wants to see the launch.
            compiled[(*grid, 1)](*arguments, *values)
            return True
        stream = torch._C._cuda_getCurrentRawStream(device)
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(*grid, 1, stream, function, metadata, None, None, None, *arguments, *values)
        return True

    def _first(
        self,
        key: Hashable,
        grid: tuple[int, int],
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        if self._waits:
            early = starts_early(arguments[0].device)
            constants = {**constants, "EARLY": early}
            options = {**options, "launch_pdl": True} if early else options
        compiled = self._kernel[grid](*arguments, **constants, **options)
        if isinstance(self._kernel, JITFunction) and compiled is not None:
            names = self._kernel.arg_names[len(arguments) :]
            assert list(constants) == names, f"constants in the order {names}"
            self._compiled[key] = (compiled, tuple(constants.values()), torch.cuda.current_device())


def form_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a key needs of tensors whose kernel is compiled for their types, row widths and strides:
    all but the first dimension's size, and alignment to 16 bytes. So keys stay few, however many
    batches come."""
    return tuple(
        [  # lists: a generator costs the host more, and layers ask again and again
            None
            if one is None
            else (one.dtype, one.shape[1:], one.stride(), one.get_device(), one.data_ptr() % 16)
            for one in tensors
        ]
    )


def type_of(*tensors: Tensor) -> tuple[Any, ...]:
    """As `form_of`, of tensors on whose alignment the kernel is not specialised: lengths, tables
    and parameters of rows, which are slices of a launch's one upload."""
    return tuple([(one.dtype, one.shape[1:], one.stride(), one.get_device()) for one in tensors])


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels can be launched before the one ahead of them ends, and wait by themselves."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def num_sms(device: torch.device, on_cpu: int) -> int:
    """Multiprocessors of a device; on_cpu: how many a kernel takes the interpreter for."""
    if device.type != "cuda":
        return on_cpu
    return torch.cuda.get_device_properties(device).multi_processor_count
