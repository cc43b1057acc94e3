"""Figures of routing: how even the load was, how good each choice, how right the view of caches.

load_cv     standard deviation / mean over replicas of the requests that have not ended, as the
            router counts them, the mean over all decisions; each is taken before its request is
            counted, and left out while there is none anywhere
busy_cv     likewise of the seconds that each replica computed, over the run
regret_s    start of the request at the chosen replica - the least of all (true_starts.py)
best_share  decisions whose regret is below a millisecond
view        prompt tokens that the router thought cached at the chosen replicas, those that were
            there at that moment, and the mean of |difference| / prompt
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from core.request import Request
from plugins.mode.samples import distribution
from plugins.mode.true_starts import Starts
from plugins.shared.routing import ReplicaTable, RouteRecord

GOOD_S = 1e-3


class TrueStarts:
    """When each replica would start a request that comes now, worked out once a request."""

    def __init__(self, replicas: Sequence[Starts]) -> None:
        self._replicas = replicas
        self._request_id = ""
        self._starts = np.empty(0)

    def of(self, request: Request, table: ReplicaTable | None = None) -> NDArray[np.float64]:
        """Seconds from its arrival, float64 [replicas]; in a simulation a table has them all."""
        if self._request_id != request.request_id:
            now_s = request.arrival_s
            self._starts = np.array([one.start_s(request, now_s) for one in self._replicas])
            self._request_id = request.request_id
        return self._starts


class RouteTotals:
    """Sums over a run's decisions. lines: where each goes as JSON, None = nowhere. starts: None =
    no regret."""

    def __init__(self, lines: IO[str] | None, starts: TrueStarts | None) -> None:
        self._lines = lines
        self._starts = starts
        self._cvs = array("d")
        self._regrets = array("d")
        self._errors = array("d")
        self._thought = self._found = 0
        self._record: RouteRecord | None = None

    def decided(self, record: RouteRecord) -> None:
        """The router's choice."""
        self._record = record

    def sent(self, chosen: int, request: Request, found_tokens: int, loads: Sequence[int]) -> None:
        """The request goes to the replica of that index, which holds so much of its prompt. loads:
        requests of each that had not ended, this one not counted."""
        record, load = self._record, np.array(loads)
        assert record is not None, "a request is sent where the router said"
        self._thought += record.cached_tokens
        self._found += found_tokens
        self._errors.append(abs(record.cached_tokens - found_tokens) / len(request.prompt))
        if load.any():
            self._cvs.append(variation(load))
        more: dict[str, float] = {"found_tokens": found_tokens}
        if self._starts is not None:
            starts = self._starts.of(request)
            more["start_s"] = float(starts[chosen])
            more["regret_s"] = float(starts[chosen] - starts.min())
            self._regrets.append(more["regret_s"])
        if self._lines is not None:
            self._lines.write(json.dumps(asdict(record) | more) + "\n")

    def summary(self, busy_s: Sequence[float]) -> dict[str, Any]:
        """The figures of the module's docstring. busy_s: of each replica."""
        regrets = np.array(self._regrets)
        return {
            "decisions": len(self._errors),
            "load_cv": float(np.mean(self._cvs)) if len(self._cvs) else None,
            "busy_cv": variation(np.array(busy_s)) if any(busy_s) else None,
            "regret_s": None if self._starts is None else distribution(regrets),
            "best_share": float(np.mean(regrets < GOOD_S)) if len(regrets) else None,
            "view": {
                "thought_tokens": self._thought,
                "found_tokens": self._found,
                "mean_error": float(np.mean(self._errors)) if len(self._errors) else None,
            },
        }


def variation(values: NDArray[Any]) -> float:
    """The coefficient of variation of values whose sum is above 0."""
    return float(values.std() / values.mean())
