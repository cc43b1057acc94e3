"""What the device did on sampled steps: kernels.json and kernels.md in the run's folder.

Windows of steps are profiled by torch.profiler, which sees single kernels inside CUDA graphs too.
The device is waited for at both ends of a window, so that it holds whole launches: those of the
steps that begin while it is open."""

import json
import math
import sys
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from core.config import require
from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.records import RequestRecord, StepRecord
from plugins.shared.run_info import RunInfo, SinkQuery
from plugins.shared.session import Records
from plugins.sink.kernel_profile import KernelEvent, launches_of, times_of
from plugins.sink.kernel_report import (
    Report,
    Roofline,
    Sample,
    Total,
    kind_report,
    markdown,
    run_report,
)
from plugins.sink.step_work import CHUNKS, ONE_TOKEN, Ceilings, ModelShape, StepWork, WorkCounter
from plugins.sink.torch_profiler import TorchProfiler

RESULTS = "kernels.json"


class DeviceProfiler(Protocol):
    """Records what a device does."""

    def wait(self) -> None:
        """Wait for the device: time of the run, not of the profiler."""

    def start(self) -> None:
        """Record from now on, when nothing runs."""

    def stop(self) -> list[KernelEvent]:
        """What the device did since `start`, when nothing runs any more."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps are profiled: `steps` of them after the first `after`, then again `every` steps
    later, `windows` times in all."""

    after: int
    steps: int
    windows: int
    every: int


@dataclass(slots=True, eq=False)
class Window:
    """A profiled part of a run: the work of the steps that began in it, seconds of its clock, and
    what the device did. closes_at: launches seen when it closes."""

    begin_s: float
    closes_at: int
    end_s: float = math.inf
    works: list[StepWork] = field(default_factory=list)
    events: list[KernelEvent] = field(default_factory=list)


class Kernels:
    """Profiles steps of a run on a CUDA device. Needs records=full, for each step's rows.

    after, steps, windows, every: see Schedule; steps without a launch do not count. bandwidth_tb_s,
    matmul_tflop_s: what a device reaches whose name has `ceilings_of` in it; null, or another
    device: no shares of the roofline."""

    def __init__(
        self,
        after: int = 100,
        steps: int = 20,
        windows: int = 1,
        every: int = 200,
        bandwidth_tb_s: float | None = 4.28,
        matmul_tflop_s: float | None = 790.0,
        ceilings_of: str = "H200",
        records: str | Records = "full",
    ) -> None:
        require(after >= 1, "kernels.after", ">= 1", after)
        require(steps >= 2, "kernels.steps", ">= 2", steps)
        require(windows >= 1, "kernels.windows", ">= 1", windows)
        holds = windows == 1 or every >= steps + 2
        require(holds, "kernels.every", f">= steps + 2 = {steps + 2}", every)
        for name, value in (("bandwidth_tb_s", bandwidth_tb_s), ("matmul_tflop_s", matmul_tflop_s)):
            require(value is None or value > 0, f"kernels.{name}", "> 0 or null", value)
        level = Records(records)
        require(level is Records.full, "records", "full for sink kernels", level.value)
        self.schedule = Schedule(after, steps, windows, every)
        self.bandwidth_tb_s = bandwidth_tb_s
        self.matmul_tflop_s = matmul_tflop_s
        self.ceilings_of = ceilings_of

    @hookimpl
    def build_sink(self, query: SinkQuery) -> "KernelsSink":
        """Raises ConfigError without a CUDA device, or if its kernels cannot be seen."""
        device = str(query.run.manifest.get("device"))
        require(device.startswith("cuda"), "device", "a CUDA device for sink kernels", device)
        profiler = TorchProfiler(device)
        profiler.prove()
        executor = query.run.manifest.get("executor") or {}
        roofline = Roofline(ModelShape.of(executor), self._ceilings(executor))
        return KernelsSink(Path(query.folder), self.schedule, profiler, roofline)

    def _ceilings(self, executor: dict[str, Any]) -> Ceilings | None:
        known = self.ceilings_of in str(executor.get("device_name"))
        if not known or self.bandwidth_tb_s is None or self.matmul_tflop_s is None:
            return None
        return Ceilings(self.bandwidth_tb_s * 1e12, self.matmul_tflop_s * 1e12)


class KernelsSink:
    """Profiles one run. Holds 8 bytes a step, a number a token stream, and its windows."""

    immediate = True  # a window opens and closes between two steps of the engine

    def __init__(
        self, folder: Path, schedule: Schedule, profiler: DeviceProfiler, roofline: Roofline
    ) -> None:
        self._folder = folder
        self._schedule = schedule
        self._profiler = profiler
        self._roofline = roofline
        self._counter = WorkCounter()
        self._totals: dict[str, Total] = {}
        self._outside_s = {ONE_TOKEN: array("d"), CHUNKS: array("d")}
        self._windows: list[Window] = []
        self._open = False
        self._seen = 0  # launches
        self._last_end_s: float | None = None  # of a step that the profiler did not disturb
        self._profiling_s = 0.0  # while the run waited and the device had nothing to do

    def step(self, record: StepRecord) -> None:
        """Take in a step; open or close a window after it."""
        if not record.num_rows:
            return
        work = self._counter.of(record)
        total = self._totals.setdefault(work.kind, Total())
        total.add(self._roofline.least_s(work))
        window = self._windows[-1] if self._windows else None
        if window is not None and window.begin_s <= record.start_s < window.end_s:
            window.works.append(work)
            self._last_end_s = None
        else:
            if self._last_end_s is not None:
                self._outside_s[work.kind].append(record.end_s - self._last_end_s)
            self._last_end_s = record.end_s
        self._seen += 1
        self._turn(record.end_s)

    def request(self, record: RequestRecord) -> None:
        """Nothing to do."""

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Write the report and print it without single kernels. Raises ConfigError if the run was
        shorter than kernels.after, RuntimeError if no window could be read."""
        if self._open:
            self._stop(math.inf)
        report = self._report(run, summary.get("duration_s"))
        text = json.dumps(report, indent=2, allow_nan=False)
        (self._folder / RESULTS).write_text(text + "\n", encoding="utf-8")
        (self._folder / "kernels.md").write_text(markdown(report), encoding="utf-8")
        sys.stdout.write("\n" + markdown(report, by_kernel=False))

    def fail(self, error: BaseException) -> None:
        """The run broke: let the profiler go."""
        if self._open:
            self._stop(math.inf)

    def _turn(self, now_s: float) -> None:
        schedule = self._schedule
        if self._open:
            if self._seen == self._windows[-1].closes_at:
                self._profiling_s += self._stop(now_s)
            return
        number = len(self._windows)
        if number < schedule.windows and self._seen == schedule.after + number * schedule.every:
            self._windows.append(Window(now_s, self._seen + schedule.steps))
            self._profiler.wait()
            begin_s = time.perf_counter()
            self._profiler.start()
            self._profiling_s += time.perf_counter() - begin_s
            self._open, self._last_end_s = True, None

    def _stop(self, now_s: float) -> float:
        """Close the window; seconds that this took once the device was done."""
        window, self._open = self._windows[-1], False
        self._profiler.wait()
        begin_s = time.perf_counter()
        window.end_s, window.events = now_s, self._profiler.stop()
        return time.perf_counter() - begin_s

    def _report(self, run: RunInfo, duration_s: float | None) -> Report:
        samples, left_out = self._samples()
        kinds = {
            kind: kind_report(own, self._totals[kind], self._outside_s[kind], self._roofline)
            for kind, own in samples.items()
        }
        executor = run.manifest.get("executor") or {}
        return {
            "name": run.name,
            "about": self._about(executor),
            "device": executor.get("device_name"),
            "model": executor.get("model"),
            "kinds": kinds,
            "run": run_report(kinds, self._totals, duration_s, self._profiling_s),
            "left_out": left_out,
        }

    def _samples(self) -> tuple[dict[str, list[Sample]], list[str]]:
        """Profiled steps by kind, and why windows are left out."""
        after = self._schedule.after
        if not self._windows:
            raise ConfigError(f"kernels.after must be below {self._seen} steps, got {after}")
        samples: dict[str, list[Sample]] = {}
        left_out = []
        for number, window in enumerate(self._windows):
            launches, steps = launches_of(window.events), window.works
            if len(launches) != len(steps):
                found = f"{len(window.events)} kernels and copies in {len(launches)} launches"
                left_out.append(f"window {number}: {found}, not {len(steps)}")
                continue
            for work, times in zip(steps[1:], times_of(launches), strict=True):
                samples.setdefault(work.kind, []).append((work, times))
        if not samples:
            reason = "; ".join(left_out) or "no window holds two steps"
            raise RuntimeError(f"kernels: nothing was sampled: {reason}")
        return samples, left_out

    def _about(self, executor: dict[str, Any]) -> str:
        text = f"{executor.get('model')} on {executor.get('device_name')}."
        ceilings = self._roofline.ceilings
        if self._roofline.shape is None:
            text += " The model's bytes and operations are not known."
        if ceilings is None:
            return text + " The device's ceilings are not known: no shares of the roofline."
        reached = f"{ceilings.bytes_s / 1e12:g} TB/s and {ceilings.flops / 1e12:g} TFLOP/s"
        return f"{text} Roofline: {reached}."
