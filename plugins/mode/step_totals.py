"""Sums over the step records of a run, in constant memory. plugins/mode/summary.py turns them into
metrics."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from core.records import StepRecord

SUMMED = (
    "prefill_tokens",
    "decode_tokens",
    "recomputed_tokens",
    "sampled_tokens",
    "duplicate_prefill_tokens",
    "pages_evicted",
)
_summed = attrgetter(*SUMMED)


@dataclass(slots=True)
class StepTotals:
    """Running sums over step records: constant memory, whatever the number of steps.

    page_size, pool_pages: of the allocator. counts: sums of the fields SUMMED, preemptions,
    launches, those that a captured graph ran, and the graphs' padding_tokens.
    host_us: microseconds by part. integrals, peaks: of the levels below, integrals in level *
    seconds. measure_from_s, measure_to_s: steps that start outside are left out. Integrals weigh
    each step's state by the time it was the one being executed, so overlapping launches are not
    counted twice and idle time not at all.
    """

    page_size: int
    pool_pages: int
    measure_from_s: float = 0.0
    measure_to_s: float = math.inf
    steps: int = 0
    busy_s: float = 0.0
    last_end_s: float | None = None
    counts: Counter[str] = field(default_factory=Counter)
    host_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    integrals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[str, int] = field(default_factory=dict)

    def add(self, record: StepRecord) -> None:
        """Count one step (or `record.steps` equal ones). Records come in order."""
        before_s = record.start_s if self.last_end_s is None else self.last_end_s
        self.last_end_s = max(record.end_s, before_s)
        if not self.measure_from_s <= record.start_s <= self.measure_to_s:
            return
        counts, steps = self.counts, record.steps
        self.steps += steps
        for name, value in zip(SUMMED, _summed(record), strict=True):
            if value:
                counts[name] += value
        if record.choices:
            counts["preemptions"] += sum([c.kind == "preempted" for c in record.choices])
        if record.num_rows:
            counts["launches"] += steps
        if record.graph_tokens:
            computed = (
                record.prefill_tokens + record.decode_tokens if steps == 1 else record.num_rows
            )
            graphs = steps - record.slices
            counts["graph_launches"] += graphs
            counts["graph_tokens"] += graphs * record.graph_tokens
            counts["padding_tokens"] += graphs * max(record.graph_tokens - computed, 0)
        for part, micros in record.host_us.items():
            self.host_us[part] += micros
        weight_s = max(record.end_s - max(record.start_s, before_s), 0.0)
        self.busy_s += weight_s
        before = self._before_end(record) if record.steps > 1 else {}
        for name, value in self._levels(record).items():
            self.integrals[name] += weight_s * (value - before.get(name, 0.0))
            if value > self.peaks.get(name, -1):
                self.peaks[name] = value

    def mean(self, name: str) -> float | None:
        """Time-weighted mean of a level, None without time."""
        return self.integrals.get(name, 0.0) / self.busy_s if self.busy_s else None

    def _levels(self, record: StepRecord) -> dict[str, int]:
        page = self.page_size
        cached = record.pages_evictable * page
        reserved = (record.pages_tree + record.pages_request) * page
        filled = record.pages_tree * page + record.used_tokens
        return {
            "reserved_tokens": reserved,
            "live_tokens": filled - cached,
            "empty_tokens": reserved - filled,
            "external_tokens": record.external_tokens,
            "batch": record.num_rows,
            "running": record.running,
            "waiting": record.waiting,
        }

    def _before_end(self, record: StepRecord) -> dict[str, float]:
        """How far levels at the end of steps that went in one are above their means over these."""
        return {
            "reserved_tokens": record.later_free * self.page_size,
            "live_tokens": record.later_tokens,
            "empty_tokens": record.later_pages * self.page_size - record.later_tokens,
        }


def merged(parts: Sequence[StepTotals]) -> StepTotals:
    """Sums over several engines of one size: levels become means over those that compute, and their
    pool is that of one."""
    if len(parts) == 1:
        return parts[0]
    page_size, pool_pages = (parts[0].page_size, parts[0].pool_pages) if parts else (1, 0)
    whole = StepTotals(page_size, pool_pages)
    ends = [part.last_end_s for part in parts if part.last_end_s is not None]
    whole.last_end_s = max(ends, default=None)
    for part in parts:
        whole.steps += part.steps
        whole.busy_s += part.busy_s
        whole.counts.update(part.counts)
        for sums, more in ((whole.host_us, part.host_us), (whole.integrals, part.integrals)):
            for name, value in more.items():
                sums[name] += value
        for name, peak in part.peaks.items():
            whole.peaks[name] = max(whole.peaks.get(name, peak), peak)
    return whole
