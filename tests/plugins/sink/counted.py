"""The sink `kernels` over a device that exists only as a list of launches."""

from pathlib import Path
from typing import Any

from core.hookspecs import hookimpl
from plugins.shared.run_info import SinkQuery
from plugins.sink.kernel_profile import KernelEvent
from plugins.sink.kernel_report import Roofline
from plugins.sink.kernels import Kernels, KernelsSink
from plugins.sink.step_work import Ceilings, ModelShape

LAUNCHED: list[int] = []
"""Rows of each launch of this process, which a test fills."""


class Counted(Kernels):
    """Profiles LAUNCHED: a decode kernel of one microsecond a row in every launch."""

    @hookimpl
    def build_sink(self, query: SinkQuery) -> KernelsSink:
        """On any device."""
        shape = ModelShape.of(query.run.manifest["executor"])
        roofline = Roofline(shape, Ceilings(1e12, 1e15))
        return KernelsSink(Path(query.folder), self.schedule, CountedProfiler(), roofline)


class CountedProfiler:
    """Sees the launches made between its start and stop."""

    def __init__(self) -> None:
        self.begin = 0

    def wait(self) -> None:
        """Nothing runs."""

    def start(self) -> None:
        self.begin = len(LAUNCHED)

    def stop(self) -> list[KernelEvent]:
        events: list[Any] = []
        for number, rows in enumerate(LAUNCHED[self.begin :]):
            at = 1000.0 * number
            events += [KernelEvent("Memcpy HtoD (Pinned -> Device)", at, 1.0, 7)]
            events += [KernelEvent("decode_kernel", at + 2, rows, 7)]
            events += [KernelEvent("Memcpy DtoH (Device -> Pinned)", at + 3 + rows, 1.0, 7)]
        return events
