"""Fit once more what was measured: python -m plugins.mode.calibrate_refit FILE STEPS [PATH].

FILE: of a calibration, of this version or an earlier one; its points are fitted, no device is
needed. STEPS: steps.npz in the folder of the same run. PATH: where the new file goes, else FILE."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from plugins.mode.calibrate import fit_all, mixed_pairs, points_of, traffic_of
from plugins.mode.calibrate_fit import Steps, steps_of
from plugins.mode.calibrate_grid import Point, Timed
from plugins.mode.calibrate_traffic import Ran, load_ran
from plugins.shared.calibration import Calibration, residuals
from plugins.shared.launch_sizes import KINDS, LaunchSizes

OPTION, DEFAULT_REPEATS = "mode.repeats=", 15


def refit(content: Mapping[str, Any], ran: Ran) -> Calibration:
    """The calibration that a file's content and the steps of its run give now."""
    measured = content["measured"]
    on_host = measured["platform"] is not None and content["device"] == "cpu"
    sizes = LaunchSizes(**content["sizes"])
    sizes = replace(sizes, mixed_pairs=mixed_pairs(measured.get("shape")))
    repeats = content.get("repeats") or _repeats(measured["command"])
    points, timed, held_out = grid_of(content)
    steps = steps_of(map(Point.facts, points, timed), sizes, repeats)
    found = fit_all(steps.part(~held_out), ran, sizes, on_host)
    starts_s = content.get("starts_s")
    if not starts_s and not on_host:
        starts_s = starts_of(steps, [one.launch_s for one in timed])
    traffic = traffic_of(ran, sizes, found, starts_s or {}, on_host, measured["overlap"])
    guessed = found.seconds(steps)
    same = {one.name: content[one.name] for one in fields(Calibration) if one.name in content}
    return Calibration(
        **same
        | {
            "forms": found.forms,
            "sizes": sizes,
            "repeats": repeats,
            "host_s": traffic.host_s,
            "host_row_s": traffic.host_row_s,
            "host_new_s": traffic.host_new_s,
            "launch_s": traffic.launch_s,
            "fit": residuals(guessed[~held_out], steps.seconds[~held_out]),
            "test": residuals(guessed[held_out], steps.seconds[held_out]),
            "traffic": traffic.error,
            "points": points_of(points, timed, guessed, held_out),
        }
    )


def grid_of(
    content: Mapping[str, Any],
) -> tuple[list[Point], list[Timed], NDArray[np.bool_]]:
    """The points of a file, what they took, and which were held out. Files before version 4 know no
    prefixes, nor when the host had started a step."""
    known, names = content["points"], [one.name for one in fields(Point)]
    points = [Point(**{name: one[name] for name in names if name in one}) for one in known]
    timed = [Timed(one["seconds"], one.get("launch_s")) for one in known]
    return points, timed, np.array([one["held_out"] for one in known], np.bool_)


def starts_of(steps: Steps, launch_s: Sequence[float | None]) -> dict[str, float]:
    """By kind of launch, the median seconds in which the host started steps of a grid: for files
    that say nothing better."""
    every = np.array(launch_s, np.float64)  # None becomes NaN
    found = {kind: every[steps.kind == at] for at, kind in enumerate(KINDS)}
    medians = {kind: float(np.median(one)) for kind, one in found.items() if len(one)}
    return {kind: seconds for kind, seconds in medians.items() if seconds > 0}


def _repeats(command: Sequence[str]) -> int:
    """Of a run whose file does not say it."""
    given = [one.removeprefix(OPTION) for one in command if one.startswith(OPTION)]
    return int(given[-1]) if given else DEFAULT_REPEATS


def main(arguments: Sequence[str]) -> None:
    """Read, fit, write; says the errors before and after."""
    file, steps = Path(arguments[0]), Path(arguments[1])
    content = json.loads(file.read_text(encoding="utf-8"))
    found = refit(content, load_ran(steps))
    path = Path(arguments[2]) if len(arguments) > 2 else file
    found.save(path)
    terminal = Console(highlight=False)
    for name in ("fit", "test", "traffic"):
        was, now = content[name]["mape"], getattr(found, name).mape
        terminal.print(f"{name}: mean error {100 * was:.1f} % -> {100 * now:.1f} %")
    terminal.print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main(sys.argv[1:])
