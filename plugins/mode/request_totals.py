"""Sums over the requests of a run, one by one as they end: memory that does not grow with tokens.

plugins/mode/summary.py turns them into metrics; what each means is said there."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from core.records import RequestRecord
from plugins.mode.samples import Distribution, distribution
from plugins.shared.measure import Slo, Window, tokens_within
from plugins.shared.metrics import (
    COMPLETED,
    e2e_s,
    queue_s,
    token_gaps_s,
    tpot_s,
    ttft_s,
)

OUTPUT_WEIGHT = 2.0  # of an output token against a prompt token, in a client's service
OF_REQUESTS = ("ttft_s", "tpot_s", "e2e_s", "normalised_s", "queue_s")


class RequestTotals:
    """What the requests of a run come to.

    window: which count, by arrival; None = all. It may still be growing: a request that ends while
    the window's end is not known arrived before it. slo: None or without limits = no attainment."""

    def __init__(self, window: Window | None = None, slo: Slo | None = None) -> None:
        self.cut = window if window is not None and window.cuts else None
        self.slo = slo if slo is not None and slo.given else None
        self.seen = 0  # requests, within the window or not
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.first_error: str | None = None
        self.first_arrival_s: float | None = None
        self.last_end_s: float | None = None
        self.service: dict[str, float] = {}
        self.gaps = Distribution()
        self._latency = {name: array("d") for name in OF_REQUESTS}

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended, or has not but never will."""
        self.seen += 1
        if self.cut is not None and record.finish_reason in COMPLETED:
            self._count_within(record, self.cut)
        if self.cut is None or self.cut.holds(record.arrival_s):
            self._count(record)

    def latency(self) -> dict[str, Any]:
        """The distribution of each latency over completed requests, seconds."""
        named = {name: distribution(np.array(self._latency[name])) for name in OF_REQUESTS}
        return {"ttft_s": named.pop("ttft_s"), "itl_s": self.gaps.summary()} | named

    def _count(self, record: RequestRecord) -> None:
        counts, output = self.counts, record.output_tokens
        arrival_s = record.arrival_s
        counts["accepted"] += 1
        self.reasons[record.finish_reason] += 1
        self.first_error = self.first_error or record.error or None
        self.first_arrival_s = _either(min, arrival_s, self.first_arrival_s)
        if record.finished_s is not None:
            self.last_end_s = _either(max, record.finished_s, self.last_end_s)
        counts["all_output"] += output
        counts["cached"] += record.cached_tokens
        counts["resumed_cached"] += record.resumed_cached_tokens
        counts["preempted"] += record.preemptions > 0
        if record.admitted_s is not None:
            counts["admitted_cached"] += record.cached_tokens
            counts["admitted_prompt"] += record.prompt_tokens
        self.service.setdefault(record.client, 0.0)
        if record.admitted_s is not None or record.first_token_s is not None:
            # a client sees tokens alone
            self.service[record.client] += record.prompt_tokens + OUTPUT_WEIGHT * output
        counts["kept"] += self.slo is not None and self.slo.kept(record)
        if record.finish_reason in COMPLETED:
            self._count_completed(record)

    def _count_completed(self, record: RequestRecord) -> None:
        output, whole_s = record.output_tokens, e2e_s(record)
        self.counts["completed"] += 1
        self.counts["prompt"] += record.prompt_tokens
        self.counts["output"] += output
        samples = {
            "ttft_s": ttft_s(record),
            "tpot_s": tpot_s(record),
            "e2e_s": whole_s,
            "normalised_s": whole_s / output if whole_s is not None and output else None,
            "queue_s": queue_s(record),
        }
        for name, value in samples.items():
            if value is not None:
                self._latency[name].append(value)
        self.gaps.add(token_gaps_s([record]))

    def _count_within(self, record: RequestRecord, cut: Window) -> None:
        """What came of a request within the window's time, whoever it was for."""
        first_s, finished_s = record.first_token_s, record.finished_s
        self.counts["output_within"] += tokens_within(record, cut.from_s, cut.to_s)
        if first_s is not None and cut.holds(first_s):
            self.counts["prompt_within"] += record.prompt_tokens
        self.counts["ended_within"] += finished_s is not None and cut.holds(finished_s)


def totals_of(
    records: Iterable[RequestRecord], window: Window | None = None, slo: Slo | None = None
) -> RequestTotals:
    """The totals of requests that are all at hand."""
    totals = RequestTotals(window, slo)
    for record in records:
        totals.add(record)
    return totals


def _either(which: Callable[[float, float], float], one: float, other: float | None) -> float:
    return one if other is None else which(one, other)
