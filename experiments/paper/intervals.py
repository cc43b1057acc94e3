"""Intervals: Student's t over seeds, and the bootstrap over requests within one run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 1000
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the interval around it; low and high None = one sample says nothing of it.

    method: `t over N seeds`, `bootstrap over N requests of one seed`, or `` without an interval."""

    mean: float
    low: float | None
    high: float | None
    count: int
    method: str = ""

    @property
    def clear(self) -> bool:
        """Whether zero lies outside."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean of one value a seed, with Student's t interval at LEVEL; none for a single seed."""
    sample = np.asarray(values, np.float64)
    mean, count = float(sample.mean()), len(sample)
    if count < 2:
        return Interval(mean, None, None, count)
    half = t_quantile((1 + LEVEL) / 2, count - 1) * float(sample.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count, f"t over {count} seeds")


def over_requests(
    value: float, statistic: Callable[[Counts], float | None], num_requests: int, seed: int = 0
) -> Interval:
    """Percentile bootstrap (Efron): `statistic` of how often each request was drawn, many times.

    value: of the requests as they were. Requests of one run share its queue, so they are not
    independent: the interval says nothing about another seed."""
    draws = np.random.default_rng(seed)
    found = [
        result
        for _ in range(RESAMPLES)
        if (result := statistic(_drawn(draws, num_requests))) is not None
    ]
    if not found:
        return Interval(value, None, None, num_requests)
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    method = f"bootstrap over {num_requests} requests of one seed"
    return Interval(value, float(low), float(high), num_requests, method)


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t for probability in (0.5, 1) and whole degrees of freedom >= 1."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0: the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    if freedom % 2:
        term, total = cosine, cosine if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        inside = 2 / math.pi * (theta + sine * total)
    else:
        term = total = 1.0
        for k in range(2, freedom - 1, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        inside = sine * total
    return 0.5 + inside / 2


def _drawn(draws: np.random.Generator, num: int) -> Counts:
    return np.bincount(draws.integers(0, num, num), minlength=num)
