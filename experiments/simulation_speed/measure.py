"""How long a simulation takes, from command to result: one process a size.

python -m experiments.simulation_speed.measure [--sizes 1000,10000,100000] [key=value ...]"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plugins.workload.azure import read_azure

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1_000, 10_000, 100_000)
QUANTILES = 64  # lengths that stand for the trace's
RATE = 5.5  # requests a second: the trace's
SETTINGS = {
    "summary": ["records=summary", "~sinks.figures", "~sinks.timeline"],
    "all": ["records=full"],
}
COLUMNS = (
    "requests",
    "writes",
    "seconds",
    "CPU seconds",
    "requests a CPU second",
    "CPU us a request",
    "steps",
    "peak MiB",
    "simulated hours",
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one command took: seconds until it had ended, and of a processor (what else runs there
    does not count), peak resident memory in bytes; and what it simulated. num_requests: of the run;
    writes: a key of SETTINGS."""

    num_requests: int
    writes: str
    seconds: float
    cpu_s: float
    peak_bytes: int
    num_steps: int
    simulated_s: float

    def row(self) -> list[str]:
        """Values of COLUMNS."""
        return [
            f"{self.num_requests:,}",
            self.writes,
            f"{self.seconds:.2f}",
            f"{self.cpu_s:.2f}",
            f"{self.num_requests / self.cpu_s:,.0f}",
            f"{1e6 * self.cpu_s / self.num_requests:,.0f}",
            f"{self.num_steps:,}",
            f"{self.peak_bytes / 2**20:,.0f}",
            f"{self.simulated_s / 3600:.2f}",
        ]


def main() -> None:
    """Print a table, one line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = ",".join(map(str, SIZES))
    parser.add_argument("--sizes", default=default, help="requests of each run, joined by commas")
    parser.add_argument("--writes", choices=[*SETTINGS, "both"], default="both")
    parser.add_argument("--trace", action="store_true", help="the first SIZE requests of the trace")
    parser.add_argument("overrides", nargs="*", help="for run.py, such as +policy=sjf")
    chosen = parser.parse_intermixed_args()
    sizes = [int(size) for size in chosen.sizes.split(",")]
    every = list(SETTINGS) if chosen.writes == "both" else [chosen.writes]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for size in sizes:
        workload = trace(size) if chosen.trace else drawn(size)
        for writes in every:
            cost = measure(size, writes, [*workload, *chosen.overrides])
            print(f"| {' | '.join(cost.row())} |", flush=True)


def measure(num_requests: int, writes: str, overrides: Sequence[str]) -> Cost:
    """Run the command in a process of its own. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "run.py", "mode=simulate", "progress=false", *SETTINGS[writes]]
        log = Path(folder) / "log"
        with open(log, "w", encoding="utf-8") as text:
            began = time.perf_counter()
            child = subprocess.Popen(
                [*command, f"hydra.run.dir={out}", *overrides], cwd=ROOT, stdout=text, stderr=text
            )
            _, status, usage = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - began
            child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"exit code {child.returncode}: {log.read_text()[-2000:]}")
        summary = json.loads((out / "summary.json").read_text())
    ended = summary["requests"]["accepted"]
    if ended != num_requests:
        raise RuntimeError(f"the run must have {num_requests} requests, got {ended}")
    scale = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak_bytes = usage.ru_maxrss * scale
    steps, simulated_s = summary["steps"]["count"], summary["duration_s"]
    cpu_s = usage.ru_utime + usage.ru_stime
    return Cost(num_requests, writes, seconds, cpu_s, peak_bytes, steps, simulated_s)


def drawn(num_requests: int) -> list[str]:
    """Any number of requests with the trace's lengths and rate: prompt and output are drawn one
    apart from the other from their quantiles, arrivals are Poisson."""
    own = read_azure("conv")
    return [
        "workload=synthetic",
        f"workload.num_requests={num_requests}",
        f"workload.rate={RATE}",
        f"workload.prompt={_choice(own.prompt_tokens)}",
        f"workload.output={_choice(own.output_tokens)}",
    ]


def trace(num_requests: int) -> list[str]:
    """The first so many of the 19,366 requests of the trace."""
    return ["workload=azure_conv", f"workload.num_requests={num_requests}"]


def quantiles(lengths: NDArray[np.int64]) -> list[int]:
    """QUANTILES lengths, each in the middle of an equal share of all."""
    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.quantile(lengths, middles, method="inverted_cdf").astype(int).tolist()


def _choice(lengths: NDArray[np.int64]) -> str:
    values = ",".join(map(str, quantiles(lengths)))
    weights = ",".join(["1"] * QUANTILES)
    return f"{{kind: choice, values: [{values}], weights: [{weights}]}}"


if __name__ == "__main__":
    main()
