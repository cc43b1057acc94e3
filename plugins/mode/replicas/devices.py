"""What NVML says of the GPU that a process uses: temperature, memory, load."""

import importlib
import threading
from collections.abc import Callable
from typing import Any

from plugins.shared.routing import DeviceFacts

NVML_EVERY_S = 1.0  # some of its answers take milliseconds


class DeviceWatch:
    """`facts`: the latest; all None without a GPU, without nvidia-ml-py, or where NVML does not
    say. `read` is called in a thread of its own, now and then."""

    def __init__(
        self, read: Callable[[], DeviceFacts] | None, every_s: float = NVML_EVERY_S
    ) -> None:
        self.facts = DeviceFacts()
        self._read = read
        self._every_s = every_s
        self._ended = threading.Event()
        if read is not None:
            threading.Thread(target=self._work, name="device", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _work(self) -> None:
        assert self._read is not None, "there is something to read"
        while not self._ended.is_set():
            self.facts = self._read()
            self._ended.wait(self._every_s)


def device_reader(device: str) -> Callable[[], DeviceFacts] | None:
    """What reads the facts of the process's own CUDA device; None where there is nothing to read.
    The GPU is found by its UUID, since CUDA and NVML number devices each in their way."""
    if not device.startswith("cuda"):
        return None
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    torch: Any = importlib.import_module("torch")
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except pynvml.NVMLError:
        return None
    return lambda: read_facts(pynvml, handle)


def read_facts(nvml: Any, handle: Any) -> DeviceFacts:
    """Facts from NVML's functions in `nvml`, None for each that the device does not give."""

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:
            return None

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    load = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    heat = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return DeviceFacts(
        temperature_c=None if heat is None else float(heat),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_bytes=None if memory is None else int(memory.total),
        utilisation=None if load is None else load.gpu / 100,
    )
