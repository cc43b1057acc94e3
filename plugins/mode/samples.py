"""Percentiles of many samples in bounded memory."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 99)
EXACT = 1 << 22  # samples kept as they are; beyond, they are counted in bins
LEAST_S, MOST_S, BINS_PER_E = 1e-7, 1e7, 2048  # bins 0.05 % wide, zeros and less in the first
Samples = NDArray[np.float64]


class Distribution:
    """Samples in seconds, exact up to EXACT of them. Beyond, percentiles are those of bins 0.05 %
    wide; count, mean and max stay exact."""

    def __init__(self) -> None:
        self._parts: list[Samples] = []
        self._held = 0
        self._count, self._sum, self._max = 0, 0.0, -np.inf
        self._bins: NDArray[np.int64] | None = None

    def add(self, values: Samples) -> None:
        """Take in values float64 [n]."""
        if not len(values):
            return
        self._parts.append(values)
        self._held += len(values)
        if self._held > EXACT:
            self._fold()

    def summary(self) -> dict[str, float | int | None]:
        """As `distribution`."""
        if self._bins is None:
            return distribution(np.concatenate(self._parts) if self._parts else ())
        self._fold()
        ends = np.cumsum(self._bins)
        ranks = [int(np.searchsorted(ends, self._count * q / 100)) for q in PERCENTILES]
        middles = LEAST_S * np.exp((np.array(ranks) - 0.5) / BINS_PER_E)
        return {
            "count": self._count,
            "mean": self._sum / self._count,
            **{f"p{q}": float(value) for q, value in zip(PERCENTILES, middles, strict=True)},
            "max": self._max,
        }

    def _fold(self) -> None:
        last = int(np.ceil(np.log(MOST_S / LEAST_S) * BINS_PER_E))
        values = np.concatenate([*self._parts, np.empty(0)])
        self._count += len(values)
        self._sum += float(values.sum())
        self._max = max(self._max, float(values.max(initial=-np.inf)))
        # In place: nothing else of a long run takes as much memory.
        np.clip(values, LEAST_S, MOST_S, out=values)
        values /= LEAST_S
        np.log(values, out=values)
        values *= BINS_PER_E
        np.minimum(np.ceil(values, out=values), last, out=values)
        counts = np.bincount(values.astype(np.int64), minlength=last + 1)
        self._bins = counts if self._bins is None else self._bins + counts
        self._parts, self._held = [], 0


def distribution(samples: Iterable[float | None]) -> dict[str, Any]:
    """count, mean, p50, p90, p99 and max of what is not None; all but count None if nothing is."""
    if isinstance(samples, np.ndarray):
        values = samples
    else:
        values = np.array([value for value in samples if value is not None], dtype=np.float64)
    names = [f"p{q}" for q in PERCENTILES]
    if not len(values):
        return {"count": 0, "mean": None, **dict.fromkeys(names), "max": None}
    ranks = np.percentile(values, PERCENTILES)
    return {
        "count": len(values),
        "mean": float(values.mean()),
        **{name: float(rank) for name, rank in zip(names, ranks, strict=True)},
        "max": float(values.max()),
    }
