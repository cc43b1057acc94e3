"""Latency of clients and fairness of service under each order, beside what the VTC paper's authors
measured: python -m experiments.fairness.table FOLDER [--window 30].

Heavy clients: those with most service (prompt + 2 * output tokens) that together have half of it.
Gap and Jain: over clients that waited all through a window, as VTC's bound is stated; windows up to
the last arrival. Order of clients: Spearman's correlation of clients' mean latencies with those
measured under the same order."""

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigError
from experiments.fairness.service import Service, service
from experiments.paper.cells import markdown
from experiments.paper.folders import Column, Run, find_runs
from plugins.mode.request_totals import OUTPUT_WEIGHT
from plugins.workload.common import TRACES, open_text

MEASURED = TRACES / "fairness" / "vtc_arena_27clients_measured.csv"
PUBLISHED = ("fcfs", "lcf", "vtc")
LATENCY = ("mean latency, s", "p50, s", "heavy clients, s", "others, s")
HEADER = (
    *("order", *LATENCY, "TTFT p50, s", "gap, mean", "gap, max", "Jain, mean", "tax, %"),
    "order of clients",
)
Floats = NDArray[np.float64]


def main(folders: Sequence[Path], window_s: float = 30.0) -> str:
    """Our runs, least mean latency first, then the bound of VTC's gap, then the measured ones."""
    found, _ = find_runs(folders)
    runs = sorted(found, key=lambda run: float(np.mean(run.requests["e2e_s"])))
    rows = [row(run, service(run, window_s)) for run in runs]
    theirs = measured()
    lines = []
    for name in sorted(PUBLISHED, key=lambda name: float(np.mean(theirs[f"latency_s_{name}"]))):
        cells = latencies(theirs["client"], theirs[f"latency_s_{name}"], heavy(theirs))
        lines.append([name, *cells, f"{np.median(theirs[f'ttft_s_{name}']):.1f}"])
    bound = f"Bound of VTC's gap while two clients wait: {gap_bound(runs[0]):,.0f}"
    return "\n\n".join([markdown(HEADER, rows), bound, markdown(HEADER[:6], lines)])


def row(run: Run, served: Service) -> list[str]:
    """The cells of one run."""
    columns, gaps, shares = run.requests, served.gaps(), ["-"] * 3
    if len(gaps):  # else no two clients ever waited all through a window
        shares = [f"{gaps.mean():,.0f}", f"{gaps.max():,.0f}", f"{served.jain().mean():.2f}"]
    return [
        run.policy,
        *latencies(columns["client"], columns["e2e_s"], heavy(columns)),
        f"{np.median(columns['ttft_s']):.1f}",
        *shares,
        f"{100 * (run.summary['recompute_tax'] or 0.0):.1f}",
        agreement(run),
    ]


def latencies(client: NDArray[np.str_], latency_s: Floats, most: set[str]) -> list[str]:
    """Mean and median of all, means of the heavy clients' requests and of the others'."""
    chosen = np.isin(client, sorted(most))
    values = (
        latency_s.mean(),
        np.median(latency_s),
        *(latency_s[s].mean() for s in (chosen, ~chosen)),
    )
    return [f"{value:.1f}" for value in values]


def heavy(columns: Mapping[str, Column]) -> set[str]:
    """Clients with most service whose sum first reaches half of all."""
    clients, index = np.unique(columns["client"], return_inverse=True)
    service_of = columns["prompt_tokens"] + OUTPUT_WEIGHT * columns["output_tokens"]
    total = np.bincount(index, weights=np.asarray(service_of, np.float64))
    order = np.argsort(-total)
    count = int(np.searchsorted(np.cumsum(total[order]), total.sum() / 2)) + 1
    return {str(clients[place]) for place in order[:count]}


def agreement(run: Run) -> str:
    """Spearman's correlation with the measured means by client; empty where none was measured."""
    theirs, column = measured(), f"latency_s_{run.policy}"
    if column not in theirs:
        return ""
    ours_by, theirs_by = (
        {str(one): float(values[names == one].mean()) for one in np.unique(names)}
        for names, values in (
            (run.requests["client"], run.requests["e2e_s"]),
            (theirs["client"], theirs[column]),
        )
    )
    shared = sorted(ours_by.keys() & theirs_by.keys())
    return f"{spearman([ours_by[c] for c in shared], [theirs_by[c] for c in shared]):.2f}"


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of the ranks of values without ties."""
    ranks = [np.argsort(np.argsort(values)).tolist() for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def gap_bound(run: Run) -> float:
    """2 * max(w_p * longest prompt, w_q * M), M the tokens of the pool (VTC, theorem 4.4)."""
    kv = run.summary["kv"]
    slots = int(kv["pool_pages"] * kv["page_size"])
    return 2 * max(float(run.requests["prompt_tokens"].max()), OUTPUT_WEIGHT * slots)


@cache
def measured() -> dict[str, Column]:
    """What the authors measured, columns as in requests.csv, and those of PUBLISHED."""
    with open_text(MEASURED) as lines:
        rows = list(csv.DictReader(lines))
    numbers = {"prompt_tokens": "prompt_len", "output_tokens": "output_len"}
    numbers |= {
        f"{kind}_s_{name}": f"{kind}_s_{name}" for name in PUBLISHED for kind in ("ttft", "latency")
    }
    columns = {name: np.array([float(row[key]) for row in rows]) for name, key in numbers.items()}
    return columns | {"client": np.array([f"client-{row['client']}" for row in rows])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m experiments.fairness.table")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--window", type=float, default=30.0, help="seconds")
    asked = parser.parse_args()
    try:
        print(main(asked.folders, asked.window))
    except ConfigError as error:
        sys.exit(str(error))
