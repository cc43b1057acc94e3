"""Which part of a run counts, and which requests were served well enough.

A run begins with an empty engine and ends with one that runs dry: both flatter latency. So the
first and last requests by arrival can be left out of every figure, and time is cut where theirs
arrive."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from core.config import require
from core.records import RequestRecord
from plugins.shared.metrics import COMPLETED, tpot_s, ttft_s


@dataclass
class Measure:
    """Shares of a run's requests, by arrival, that enter no figure: warm_up the first, drain the
    last."""

    warm_up: float = 0.0
    drain: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.warm_up < 1, "measure.warm_up", "in [0, 1)", self.warm_up)
        require(0 <= self.drain < 1, "measure.drain", "in [0, 1)", self.drain)
        both = self.warm_up + self.drain
        require(both < 1, "measure.warm_up + measure.drain", "< 1", both)


@dataclass
class Slo:
    """Service level objective of a request, limits in seconds, None = none. ttft_s: time to first
    token; tpot_s: time per output token, which one token keeps; itl_s: the largest gap between two
    tokens. attainment: the share of requests that must keep them all."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    attainment: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "itl_s"):
            limit = getattr(self, name)
            require(limit is None or limit > 0, f"slo.{name}", "> 0 or null", limit)
        require(0 < self.attainment <= 1, "slo.attainment", "in (0, 1]", self.attainment)

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.itl_s))

    def kept(self, record: RequestRecord) -> bool:
        """Whether a request was completed within all limits; any other end misses them."""
        if record.finish_reason not in COMPLETED:
            return False
        return (
            _within(ttft_s(record), self.ttft_s)
            and _within(tpot_s(record), self.tpot_s)
            and (self.itl_s is None or _within(_largest_gap_s(record), self.itl_s))
        )


@dataclass(slots=True)
class Window:
    """The part of a run that counts, found while it goes on: arrivals of a closed loop are not
    known before. from_s, to_s: first and last arrival time that counts, infinite where nothing is
    cut or it is not known yet."""

    num_requests: int
    measure: Measure = field(default_factory=Measure)
    from_s: float = -math.inf
    to_s: float = math.inf
    _arrived: int = 0

    def __post_init__(self) -> None:
        if self.measure.warm_up and self._first > 0:
            self.from_s = math.inf

    def holds(self, arrival_s: float) -> bool:
        """Whether a request that arrived then counts."""
        return self.from_s <= arrival_s <= self.to_s

    @property
    def cuts(self) -> bool:
        """Whether anything is left out."""
        return self._first > 0 or self._last < self.num_requests

    def arrived(self, arrival_s: float) -> None:
        """The next request, in order of arrival. Raises ConfigError if none is left between the two
        cuts, as where all arrive at once."""
        if self._arrived == self._first and self._first > 0:
            self.from_s = arrival_s
        if self._arrived == self._last - 1 and self._last < self.num_requests:
            self.to_s = arrival_s
            lasts = self.to_s > max(self.from_s, 0.0)
            require(lasts, "measure.drain", "0 where requests arrive at once", self.measure.drain)
        self._arrived += 1

    @property
    def _first(self) -> int:
        return math.floor(self.measure.warm_up * self.num_requests)

    @property
    def _last(self) -> int:
        return self.num_requests - math.floor(self.measure.drain * self.num_requests)


def window_of(arrivals_s: Iterable[float], measure: Measure) -> Window:
    """The window of requests that are all known; see Window.arrived."""
    ordered = sorted(arrivals_s)
    window = Window(len(ordered), measure)
    for arrival_s in ordered:
        window.arrived(arrival_s)
    return window


def tokens_within(record: RequestRecord, from_s: float, to_s: float) -> int:
    """Output tokens that came in that time, both ends included."""
    return sum(
        int(np.searchsorted(times, to_s, side="right") - np.searchsorted(times, from_s))
        for times in (np.asarray(choice.times_s) for choice in record.choices)
    )


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or value is None or value <= limit


def _largest_gap_s(record: RequestRecord) -> float | None:
    gaps = [np.diff(np.asarray(choice.times_s)) for choice in record.choices]
    return max((float(one.max()) for one in gaps if len(one)), default=None)
