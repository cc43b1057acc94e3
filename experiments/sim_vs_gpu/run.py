"""Runs every cell on a device and simulated:

python -m experiments.sim_vs_gpu.run FOLDER --device "model=qwen3_0_6b" --simulated
"executor/step_time=calibrated executor.step_time.file=h200_qwen3_0_6b executor.vocab_size=151936"

A run that has its summary already is not repeated. The report: experiments/sim_vs_gpu/report.py."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.sim_vs_gpu.cells import POLICIES, SIDES, WORKLOADS, Cell, cells

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("records=requests", "progress=false", "~sinks.figures", "~sinks.timeline")
MODES = {"device": "mode=bench", "simulated": "mode=simulate"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="", help="overrides of the runs on the device")
    parser.add_argument("--simulated", default="", help="overrides of the simulated runs")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    chosen = parser.parse_args(arguments)
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    every = list(cells(chosen.workloads.split(","), chosen.policies.split(","), seeds))
    failed = 0
    for side in SIDES:
        more = shlex.split(getattr(chosen, side))
        for number, cell in enumerate(every, start=1):
            folder = chosen.folder / side / cell.folder
            if (folder / "summary.json").is_file():
                continue
            done = subprocess.run(command(side, cell, folder, more), cwd=ROOT, capture_output=True)
            ok = done.returncode == 0
            failed += not ok
            print(
                f"{side} {number}/{len(every)} {cell.folder}: {'done' if ok else 'FAILED'}",
                flush=True,
            )
            if not ok:
                print(done.stderr.decode(errors="replace")[-1000:], flush=True)
    return failed


def command(side: str, cell: Cell, folder: Path, more: Sequence[str]) -> list[str]:
    """The command line of a cell. more: overrides of the side, which come last."""
    head = [sys.executable, "run.py", MODES[side], *QUIET, f"hydra.run.dir={folder.absolute()}"]
    return [*head, *cell.overrides, *more]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
