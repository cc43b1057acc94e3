"""Runs every cell on a device and simulated:

python -m experiments.sim_vs_gpu.run FOLDER --device "model=qwen3_0_6b" --simulated
"executor/step_time=calibrated executor.step_time.file=h200_qwen3_0_6b executor.vocab_size=151936"

All runs of a side share one process, and on the device one model. What a run prints is in its
folder's output.txt. A run that has its summary already is not repeated. The report:
experiments/sim_vs_gpu/report.py."""

import argparse
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from conf.jobs import command_line
from conf.reuse import REUSE
from experiments.sim_vs_gpu.cells import POLICIES, SIDES, WORKLOADS, Cell, cells
from run import job

OUTPUT = "output.txt"
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
    parser.add_argument("--sides", nargs="*", default=SIDES, choices=SIDES)
    chosen = parser.parse_args(arguments)
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    every = list(cells(chosen.workloads.split(","), chosen.policies.split(","), seeds))
    try:
        REUSE.active = True
        return sum(run_side(side, every, chosen) for side in chosen.sides)
    finally:
        REUSE.active = False
        REUSE.forget()


def run_side(side: str, every: Sequence[Cell], chosen: argparse.Namespace) -> int:
    """Run the cells of a side that are missing; returns how many failed."""
    REUSE.forget()
    failed = 0
    more = shlex.split(getattr(chosen, side))
    for number, cell in enumerate(every, start=1):
        folder = chosen.folder / side / cell.folder
        if (folder / "summary.json").is_file():
            continue
        ok = run_cell(command(side, cell, folder, more), folder)
        failed += not ok
        print(
            f"{side} {number}/{len(every)} {cell.folder}: {'done' if ok else 'FAILED'}",
            flush=True,
        )
        if not ok:
            print((folder / OUTPUT).read_text(errors="replace")[-1000:], flush=True)
    return failed


def run_cell(line: Sequence[str], folder: Path) -> bool:
    """Run one cell in this process; whether it went well."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments, sys.argv = sys.argv, list(line)
    try:
        with open(folder / OUTPUT, "w") as out, redirect_stdout(out), redirect_stderr(out):
            try:
                return command_line(job) == 0
            except Exception:
                traceback.print_exc()
                return False
    finally:
        sys.argv = arguments


def command(side: str, cell: Cell, folder: Path, more: Sequence[str]) -> list[str]:
    """The command line of a cell. more: overrides of the side, which come last."""
    head = ["run.py", MODES[side], *QUIET, f"hydra.run.dir={folder.absolute()}"]
    return [*head, *cell.overrides, *more]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
