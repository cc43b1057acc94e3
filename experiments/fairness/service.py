"""What clients were served in windows of a run, and who of them kept waiting all through one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.paper.folders import Run
from plugins.mode.request_totals import OUTPUT_WEIGHT
from plugins.mode.summary import jain_index

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """clients: by name. served[c, w]: service of a client in a window, prompt tokens (at the first
    token) + 2 * output tokens (VTC, arXiv:2401.00588). waited[c, w]: whether at every moment of it
    some request of the client had arrived and had not been admitted."""

    clients: list[str]
    served: Floats
    waited: NDArray[np.bool_]

    def gaps(self) -> Floats:
        """Of each window with two clients that waited: the most served of them - the least."""
        return np.array([served.max() - served.min() for served in self._compared()])

    def jain(self) -> Floats:
        """Of each such window, Jain's index of what they were served."""
        found = [jain_index(served.tolist()) for served in self._compared()]
        return np.array([index for index in found if index is not None])

    def _compared(self) -> list[Floats]:
        columns = zip(self.served.T, self.waited.T, strict=True)
        return [served[waited] for served, waited in columns if waited.sum() > 1]


def service(run: Run, window_s: float) -> Service:
    """Of whole windows from the beginning to the last arrival."""
    columns = run.requests
    clients = np.unique(columns["client"]).tolist()
    edges = np.arange(0.0, float(columns["arrival_s"].max()) + 1e-9, window_s)
    own = [columns["client"] == client for client in clients]
    return Service(
        clients,
        np.stack([_served(run, rows, edges) for rows in own]),
        np.stack([_waited(run, rows, edges) for rows in own]),
    )


def _served(run: Run, own: NDArray[np.bool_], edges: Floats) -> Floats:
    first_s = run.requests["first_token_s"][own]
    prompts, _ = np.histogram(first_s, edges, weights=run.requests["prompt_tokens"][own])
    outputs, _ = np.histogram(run.tokens["time_s"][own[run.tokens["request"]]], edges)
    return np.asarray(prompts + OUTPUT_WEIGHT * outputs, np.float64)


def _waited(run: Run, own: NDArray[np.bool_], edges: Floats) -> NDArray[np.bool_]:
    arrival_s, admitted_s = run.requests["arrival_s"][own], run.requests["admitted_s"][own]
    covered_to = edges[:-1].copy()
    for row in np.argsort(arrival_s, kind="stable").tolist():
        reached = arrival_s[row] <= covered_to
        covered_to[reached] = np.maximum(covered_to[reached], admitted_s[row])
    return np.asarray(covered_to >= edges[1:])
