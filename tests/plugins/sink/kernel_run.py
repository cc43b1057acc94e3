"""Made-up launches, records and descriptions for the tests of the sink `kernels`."""

from typing import Any

from core.records import Choice, StepRecord
from plugins.sink.kernel_profile import KernelEvent
from plugins.sink.step_work import ModelShape

EXECUTOR = {
    "model": "tiny",
    "device_name": "NVIDIA H200",
    "model_dtype": "bfloat16",
    "kv_dtype": "float8_e4m3fn",
    "shape": {
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 8,
        "layer_weights": 1000,
        "head_weights": 300,
    },
}
SHAPE = ModelShape(1000, 300, 2, q_width=64, kv_token_bytes=32)


def launch(start_us: float, *kernels: tuple[str, float, float, int]) -> list[KernelEvent]:
    """An upload of 1 µs at start_us, kernels (name, start, duration, stream) counted from it, and a
    download of 1 µs after the last."""
    events = [KernelEvent("Memcpy HtoD (Pinned -> Device)", start_us, 1.0, 7)]
    events += [KernelEvent(name, start_us + at, us, stream) for name, at, us, stream in kernels]
    end_us = max(event.end_us for event in events)
    return [*events, KernelEvent("Memcpy DtoH (Device -> Pinned)", end_us, 1.0, 7)]


DECODES = (("decode_kernel", 1, 4, 7), ("nvjet_tst_64x8", 6, 2, 7))  # 1 µs idle between them
MIXED = (("_extend_kernel", 1, 6, 9), ("decode_kernel", 3, 2, 7), ("nvjet_tst_64x8", 7, 3, 7))


def admitted(name: str, cached: int, kind: str = "admitted") -> Choice:
    return Choice(name, 0, kind, "p", "r", {"cached_tokens": cached})


def record(step: int, *rows: tuple[str, int, int], **fields: Any) -> StepRecord:
    times: dict[str, float] = {"start_s": step - 0.5, "end_s": step + 1.0}  # overlapping
    return StepRecord(step, num_rows=len(rows), rows=list(rows), **(times | fields))
