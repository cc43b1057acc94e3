"""Steps against time in bounded memory: bins that merge in pairs when there are too many."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.records import StepRecord

LEVELS = (
    "pages_free",
    "pages_evictable",
    "pages_in_use",
    "pages_request",
    "batch",
    "running",
    "waiting",
)
COUNTS = (
    "prefill_tokens",
    "decode_tokens",
    "recomputed_tokens",
    "sampled_tokens",
    "preemptions",
    "pages_evicted",
    "steps",
)
_MIN_WEIGHT_S = 1e-12  # a step that took no time still shows


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Columns of equal length n. edges_s float64 [n + 1]: bin i spans edges_s[i] .. edges_s[i + 1].

    levels: time-weighted mean of each of LEVELS in the bin (pages_in_use: of the prefix cache,
    locked by running sequences; pages_evictable: the rest of it); counts: sum of each of COUNTS;
    float64 [n].
    """

    edges_s: NDArray[np.float64]
    levels: dict[str, NDArray[np.float64]]
    counts: dict[str, NDArray[np.float64]]


class StepSeries:
    """Gathers step records into at most `limit` bins of equally many steps each."""

    def __init__(self, limit: int = 2048) -> None:
        self._limit = limit
        self._per_bin = 1
        self._bins: list[NDArray[np.float64]] = []  # end_s, weight, weighted levels, counts
        self._start_s = 0.0
        self._in_last = 0

    def add(self, record: StepRecord) -> None:
        """Take in one step; constant time on average."""
        if not self._bins:
            self._start_s = record.start_s
        weight_s = max(record.end_s - record.start_s, _MIN_WEIGHT_S)
        preemptions = sum(choice.kind == "preempted" for choice in record.choices)
        derived = {
            "batch": record.num_rows,
            "pages_in_use": record.pages_tree - record.pages_evictable,
            "preemptions": preemptions,
        }
        levels = [weight_s * _value(record, name, derived) for name in LEVELS]
        counts = [_value(record, name, derived) for name in COUNTS]
        row = np.array([record.end_s, weight_s, *levels, *counts])
        if self._in_last < self._per_bin and self._bins:
            self._bins[-1] = _merge(self._bins[-1], row)
            self._in_last += 1
        else:
            self._bins.append(row)
            self._in_last = 1
        if len(self._bins) > self._limit:
            self._halve()

    def read(self) -> Series:
        """The series so far."""
        width = 2 + len(LEVELS) + len(COUNTS)
        table = np.array(self._bins).reshape(len(self._bins), width)
        weights = table[:, 1]
        counts_at = 2 + len(LEVELS)
        return Series(
            edges_s=np.concatenate([[self._start_s], table[:, 0]]),
            levels={name: table[:, 2 + i] / weights for i, name in enumerate(LEVELS)},
            counts={name: table[:, counts_at + i] for i, name in enumerate(COUNTS)},
        )

    def _halve(self) -> None:
        pairs = zip(self._bins[::2], self._bins[1::2], strict=False)
        odd = self._bins[-1:] if len(self._bins) % 2 else []
        self._in_last += 0 if odd else self._per_bin
        self._bins = [_merge(first, second) for first, second in pairs] + odd
        self._per_bin *= 2


def _merge(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    merged = first + second
    merged[0] = second[0]
    return merged


def _value(record: StepRecord, name: str, derived: dict[str, int]) -> int:
    return derived[name] if name in derived else int(getattr(record, name))
