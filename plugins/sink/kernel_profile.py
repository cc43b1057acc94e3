"""What a device did, launch by launch: kernels by group, busy and idle time. No torch here."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from plugins.sink.step_work import DECODE, EXTEND, GEMM

LAYERS, SAMPLING, TABLE, COPIES, OTHER = (
    "norm, rotary, SwiGLU",
    "sampling",
    "block table",
    "copies",
    "other",
)
GROUPS = (DECODE, EXTEND, GEMM, LAYERS, SAMPLING, TABLE, COPIES, OTHER)
OURS = {
    DECODE: "decode_kernel merge_kernel invariant_kernel fold_kernel prefix_kernel _plan_kernel"
    " _flatten_kernel _match_kernel _choose_kernel _group_kernel _cut_kernel",
    EXTEND: "_extend_kernel _dense_kernel _gather_kernel pipelined_kernel paired_kernel"
    " _merge_kernel _tiles_kernel _slots_kernel",
    GEMM: "matmul_kernel",
    LAYERS: "rms_norm_kernel rotary_store_kernel swiglu_kernel",
    SAMPLING: "_scan_kernel _finish_kernel _rows_kernel _logprobs_kernel _penalise_kernel"
    " _edit_kernel _count_kernel",
    TABLE: "update_kernel step_kernel",
}
"""Triton kernels of this repository."""

BY_NAME = {name: group for group, names in OURS.items() for name in names.split()}
PATTERNS = (
    (OTHER, re.compile(r"flash|fmha|attention", re.IGNORECASE)),  # some are cutlass kernels
    (GEMM, re.compile(r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitKreduce", re.IGNORECASE)),
    (COPIES, re.compile(r"^Mem(cpy|set)|CatArray|copy|index|gather|scatter", re.IGNORECASE)),
)
UPLOAD, DOWNLOAD = "Memcpy HtoD", "Memcpy DtoH"


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A kernel, copy or fill on a stream. Microseconds of one clock of the device."""

    name: str
    start_us: float
    duration_us: float
    stream: int

    @property
    def end_us(self) -> float:
        """When it was done."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """A launch, from the end of the one before it to its own: step = between + within + busy.

    between: nothing of it had begun; within: it had begun, and nothing ran; busy: something ran, on
    any stream. events: see `clipped`."""

    between_us: float
    within_us: float
    busy_us: float
    events: Sequence[KernelEvent]

    @property
    def step_us(self) -> float:
        """All of it."""
        return self.between_us + self.within_us + self.busy_us


def group_of(name: str) -> str:
    """The group of a kernel."""
    if name in BY_NAME:
        return BY_NAME[name]
    return next((group for group, pattern in PATTERNS if pattern.search(name)), OTHER)


def busy_us(events: Iterable[KernelEvent]) -> float:
    """Length of the union of their intervals, microseconds."""
    total, end_us = 0.0, float("-inf")
    for event in sorted(events, key=lambda one: one.start_us):
        total += max(event.end_us - max(event.start_us, end_us), 0.0)
        end_us = max(end_us, event.end_us)
    return total


def clipped(events: Iterable[KernelEvent]) -> list[KernelEvent]:
    """Each from the end of what ran ahead on its stream: a kernel that was launched before that had
    ended only waits until then."""
    ends: dict[int, float] = {}
    found = []
    for event in sorted(events, key=lambda one: one.start_us):
        start_us = max(event.start_us, ends.get(event.stream, event.start_us))
        end_us = max(event.end_us, start_us)
        ends[event.stream] = end_us
        found.append(replace(event, start_us=start_us, duration_us=end_us - start_us))
    return found


def launches_of(events: Iterable[KernelEvent]) -> list[list[KernelEvent]]:
    """Events by launch, in order of time. A launch begins by an upload and ends by downloads, so
    the first upload after a download begins the next."""
    launches: list[list[KernelEvent]] = []
    ended = True
    for event in sorted(events, key=lambda one: one.start_us):
        if not launches or (ended and event.name.startswith(UPLOAD)):
            launches.append([])
            ended = False
        ended |= event.name.startswith(DOWNLOAD)
        launches[-1].append(event)
    return launches


def times_of(launches: Sequence[Sequence[KernelEvent]]) -> list[LaunchTimes]:
    """All launches but the first, which has none before it to measure from."""
    times = []
    for before, launch in pairwise(launches):
        last_us = max(event.end_us for event in before)
        first_us = min(event.start_us for event in launch)
        end_us = max(event.end_us for event in launch)
        busy = busy_us(launch)
        within_us = max(end_us - first_us - busy, 0.0)  # rounding
        between_us = max(first_us - last_us, 0.0)
        times.append(LaunchTimes(between_us, within_us, busy, clipped(launch)))
    return times
