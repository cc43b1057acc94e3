"""Service of clients over time, and the gap between those that wait for it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigError
from experiments.figure.options import Options, one_seed
from experiments.figure.plots import Line, LinePlot, Panel
from experiments.paper.folders import Run
from plugins.mode.request_totals import OUTPUT_WEIGHT

WINDOWS = 40  # where --window is not given
SHOWN = 7  # clients with a line of their own
GAP = "gap"
Floats = NDArray[np.float64]


def fairness(runs: Sequence[Run], options: Options) -> LinePlot:
    """Cumulative service of the largest clients, a panel a policy, and for each window the gap
    between the most and the least served of the clients that had a request in the system all
    through it. Service: prompt tokens, at the first token, + 2 * output tokens (VTC,
    arXiv:2401.00588)."""
    chosen = one_seed(runs, options)
    lines: list[Line] = []
    panels: dict[str, Panel] = {}
    clients: list[str] = []
    for policy, run in chosen.items():
        edges = _edges(run, options.window_s)
        service = {name: _served(run, name, edges) for name in np.unique(run.requests["client"])}
        if len(service) < 2:
            raise ConfigError(f"FOLDER must hold runs of at least two clients, got {list(service)}")
        clients = clients or sorted(service, key=lambda name: -service[name][-1])[:SHOWN]
        panels[policy] = Panel("time (s)", f"service, {policy}")
        for name in clients:
            lines.append(Line(policy, name, edges.tolist(), service[name].tolist(), style="plain"))
        middles = ((edges[1:] + edges[:-1]) / 2).tolist()
        gaps = _gaps(run, edges, service)
        lines.append(Line(GAP, policy, middles, gaps.tolist(), style="plain"))
    panels[GAP] = Panel("time (s)", "service gap in a window")
    return LinePlot(panels, lines, clients=tuple(clients))


def _edges(run: Run, window_s: float | None) -> Floats:
    end = float(np.nanmax(run.requests["finished_s"]))
    num = WINDOWS if window_s is None else max(round(end / window_s), 1)
    return np.linspace(0, end, num + 1)


def _served(run: Run, client: str, edges: Floats) -> Floats:
    """Cumulative service at each edge."""
    own = run.requests["client"] == client
    first_s = run.requests["first_token_s"]
    began = own & np.isfinite(first_s)
    order = np.argsort(first_s[began])
    prompts = np.concatenate([[0], np.cumsum(run.requests["prompt_tokens"][began][order])])
    tokens_s = np.sort(run.tokens["time_s"][own[run.tokens["request"]]])
    outputs = np.searchsorted(tokens_s, edges, side="right")
    started = np.searchsorted(first_s[began][order], edges, side="right")
    return np.asarray(prompts[started] + OUTPUT_WEIGHT * outputs, np.float64)


def _gaps(run: Run, edges: Floats, service: dict[str, Floats]) -> Floats:
    """Of each window, NaN where fewer than two clients were backlogged all through it."""
    gaps = np.full(len(edges) - 1, np.nan)
    gained = {name: np.diff(total) for name, total in service.items()}
    backlogged = {name: _backlogged(run, name, edges) for name in service}
    for index in range(len(gaps)):
        values = [gained[name][index] for name in service if backlogged[name][index]]
        if len(values) > 1:
            gaps[index] = max(values) - min(values)
    return gaps


def _backlogged(run: Run, client: str, edges: Floats) -> NDArray[np.bool_]:
    """Whether a client had an unfinished request at every moment of each window."""
    own = run.requests["client"] == client
    starts, ends = run.requests["arrival_s"][own], run.requests["finished_s"][own]
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(np.nan_to_num(ends[order], nan=np.inf))
    fresh = np.concatenate([[True], starts[1:] > ends[:-1]])  # begins after all before have ended
    begin = starts[fresh]
    finish = np.concatenate([ends[:-1][fresh[1:]], ends[-1:]])
    covers = (begin[:, None] <= edges[:-1]) & (finish[:, None] >= edges[1:])
    return np.asarray(covers.any(axis=0))
