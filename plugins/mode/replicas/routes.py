"""A serving router's decisions: a line for each, and how even they left the load."""

import json
from dataclasses import asdict
from typing import IO, Any

import numpy as np

from plugins.mode.route_totals import variation
from plugins.shared.replica_registry import Registry
from plugins.shared.routing import RouteRecord


class Routes:
    """Told of each decision once it is counted. lines: where it goes as JSON, None = nowhere.

    load_cv: as plugins/mode/route_totals.py defines it, over the replicas that live."""

    def __init__(self, registry: Registry, lines: IO[str] | None) -> None:
        self.registry = registry
        self._lines = lines
        self._decisions = self._uneven = 0
        self._cv_sum = 0.0

    def decided(self, record: RouteRecord) -> None:
        """The router's choice."""
        self._decisions += 1
        listed = self.registry.listed(0.0)
        loads = np.array([len(one.open) for one, _ in listed if not one.dead])
        loads -= [one.replica == record.replica for one, _ in listed if not one.dead]
        if loads.any():
            self._uneven += 1
            self._cv_sum += variation(loads)
        if self._lines is not None:
            self._lines.write(json.dumps(asdict(record)) + "\n")

    def summary(self) -> dict[str, Any]:
        """decisions and load_cv; regret_s needs a simulation."""
        load_cv = self._cv_sum / self._uneven if self._uneven else None
        return {"decisions": self._decisions, "load_cv": load_cv, "regret_s": None}
