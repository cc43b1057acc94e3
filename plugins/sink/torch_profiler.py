"""torch.profiler as the profiler of plugins/sink/kernels.py. torch is imported on use alone."""

import os
from typing import Any

from core.config import require
from plugins.sink.kernel_profile import KernelEvent


class TorchProfiler:
    """torch.profiler over a CUDA device; torch is imported on use. device: cuda or cuda:N."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._profile: Any = None

    def prove(self) -> None:
        """Profile one kernel, which also loads what profiling needs. Raises ConfigError if it is
        not seen."""
        import torch

        # Without this a second start under CUDA graphs may crash (torch/profiler/profiler.py).
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        self.wait()
        self.start()
        torch.ones(1, device=self._device).add_(1)
        self.wait()
        seen = self.stop()
        require(bool(seen), "sink kernels", "able to see kernels (CUPTI)", "none of one launched")

    def wait(self) -> None:
        """Wait for the device."""
        import torch

        torch.cuda.synchronize(self._device)

    def start(self) -> None:
        """Record from now on."""
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self._profile.start()

    def stop(self) -> list[KernelEvent]:
        """What the device did since `start`: all of it, after `wait`."""
        self._profile.stop()
        found = [one for one in self._profile.events() if one.device_type.name == "CUDA"]
        self._profile = None
        return [
            KernelEvent(
                name=one.name,
                start_us=one.time_range.start,
                duration_us=one.time_range.elapsed_us(),
                stream=one.device_resource_id,
            )
            for one in found
        ]
