"""Metrics of a request, each defined once. plugins/mode/summary.py sums a run up in their terms.

Latencies are taken over *completed* requests, those that ended with stop or length: aborted,
capacity and error requests are counted apart.

- TTFT: first token - arrival, queueing included.
- ITL: every gap between successive tokens of one choice, one sample a gap.
- TPOT: (E2E - TTFT) / (n - 1), one sample a request, none for n = 1 (n: the longest choice).
- E2E: finish - arrival. Queue: first admission - arrival."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from core.records import RequestRecord
from core.request import FinishReason

COMPLETED = (FinishReason.stop.value, FinishReason.length.value)

Samples = NDArray[np.float64]


def completed(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those that ended with stop or length: the ones latencies are taken over."""
    return [r for r in records if r.finish_reason in COMPLETED]


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token, seconds; None if it never got one."""
    first = record.first_token_s
    return None if first is None else first - record.arrival_s


def e2e_s(record: RequestRecord) -> float | None:
    """Arrival to end, seconds; None while unfinished."""
    return None if record.finished_s is None else record.finished_s - record.arrival_s


def queue_s(record: RequestRecord) -> float | None:
    """Arrival to first admission, seconds; None if never admitted."""
    return None if record.admitted_s is None else record.admitted_s - record.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first, seconds; None for fewer than two tokens."""
    longest = max((len(c.token_ids) for c in record.choices), default=0)
    whole, first = e2e_s(record), ttft_s(record)
    if longest < 2 or whole is None or first is None:
        return None
    return (whole - first) / (longest - 1)


def token_gaps_s(records: Iterable[RequestRecord]) -> Samples:
    """All gaps between successive tokens of a choice, seconds, float64 (the ITL samples)."""
    streams = [np.asarray(choice.times_s) for record in records for choice in record.choices]
    gaps: list[Samples] = [times[1:] - times[:-1] for times in streams if len(times) > 1]
    if len(gaps) == 1:
        return gaps[0]
    return np.concatenate(gaps) if gaps else np.empty(0)
