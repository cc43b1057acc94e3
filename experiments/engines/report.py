"""Tables from logs of run.py and host.py beside this file.

    python -m experiments.engines.report engines.jsonl [more.jsonl] [--readme FILE]

Replaces what stands in the README between `<!-- bench:NAME -->` and `<!-- /bench -->`: NAME is a
model, `online_MODEL`, `timeline_MODEL` or `host`. Of several rounds the median counts."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.engines.workloads import ONLINE
from experiments.kernels.report import filled

HERE = Path(__file__).parent
OURS = "tritium"
HOST_PARTS = ("plan", "pack", "launch", "collect", "commit", "observers", "step")
LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")

Line = dict[str, Any]
Cells = dict[str, dict[str, list[Line]]]  # workload -> engine -> rounds


def main() -> None:
    """Write what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    arguments = parser.parse_args()
    lines = [json.loads(line) for log in arguments.logs for line in log.read_text().splitlines()]
    arguments.readme.write_text(filled(arguments.readme.read_text(), tables(lines)))


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Markdown by name: MODEL for what starts at once, online_MODEL for what arrives, host; and
    timeline_MODEL for lines of run.py --timeline, which are in no other table."""
    made = {}
    if hosts := [line for line in lines if line["kind"] == "host"]:
        made["host"] = host(hosts)
    engines = [line for line in lines if line["kind"] == "engine"]
    for model in dict.fromkeys(line["model"] for line in engines):
        both = [line for line in engines if line["model"] == model]
        own = [line for line in both if "timeline" not in line]
        if profiled := [line for line in both if "timeline" in line and "floor_s" in line]:
            made[f"timeline_{model}"] = timeline(profiled, _cells(own, online=False))
        if cells := _cells(own, online=False):
            made[model] = _offline(cells)
        if cells := _cells(own, online=True):
            made[f"online_{model}"] = _online(cells)
    return made


def host(lines: Sequence[Line]) -> str:
    """A row a case of host.py, microseconds."""
    head = ["executor", "overlap", "hooks", "sinks", *HOST_PARTS]
    rows = [
        [
            line["executor"],
            "yes" if line["overlap"] else "no",
            "direct" if line["direct"] else "pluggy",
            str(line["sinks"] or "none"),
            *(f"{line[part]:.0f}" for part in HOST_PARTS),
        ]
        for line in lines
    ]
    return _table(head, rows)


def timeline(lines: Sequence[Line], cells: Cells) -> str:
    """A row a workload and round of --timeline: time and its parts, the floor with a shared prefix
    read once, what kernels took beyond it, and the device idle. The time is our median in cells,
    which no profiler slowed; without one, the profiled run's own, its profiler's stops left out."""
    head = ["workload", "time, s", "floor, s", "kernel gap, s", "idle gap, s"]
    head += ["floor, share", "kernel gap", "idle gap"]
    rows = []
    for line in lines:
        found, least_s = line["timeline"], line["floor_once_s"]
        own = cells.get(line["workload"], {}).get(OURS)
        whole_s = _median(own, "wall_s") if own else found["measured_s"]
        row = [line["workload"], f"{whole_s:.2f}" if own else f"{whole_s:.2f} profiled"]
        if found["busy_s"] is None:
            missing = ", ".join(f"{n} steps {kind}" for kind, n in found["not_sampled"].items())
            row += [f"{least_s:.2f}", f"not sampled: {missing}", *["-"] * 4]
        else:
            parts = least_s, found["busy_s"] - least_s, whole_s - found["busy_s"]
            row += [f"{part:.2f}" for part in parts]
            row += [f"{part / whole_s:.1%}" for part in parts]
        rows.append(row)
    return _table(head, rows)


def comparison(lines: Sequence[Line]) -> str:
    """All tables, for a terminal."""
    return "\n".join(f"{name}\n{text}" for name, text in tables(lines).items())


def ratio(cells: dict[str, list[Line]], engine: str, key: str = "wall_s") -> float | None:
    """Our median over another engine's: below 1 is faster. None if either did not run."""
    if OURS not in cells or engine not in cells:
        return None
    mine, other = (_median(cells[name], key) for name in (OURS, engine))
    return mine / other


def _offline(cells: Cells) -> str:
    engines = _engines(cells)
    head = ["workload", *(f"{name}, s" for name in engines)]
    head += ["output tok/s", "total tok/s"]
    head += [f"to {name}" for name in engines if name != OURS]
    head += ["floor, s", "shared prefix once", "floor / ours"]
    rows = []
    for workload, runs in cells.items():
        row = [workload, *_each(engines, runs, lambda own: f"{_median(own, 'wall_s'):.2f}")]
        for key in ("output_tok_s", "total_tok_s"):
            row += _each([OURS], runs, lambda own, key=key: f"{_median(own, key):,.0f}")
        row += [_ratio(runs, name) for name in engines if name != OURS]
        least = next(iter(runs.values()))[0]
        row += [f"{least['floor_s']:.2f}", f"{least['floor_once_s']:.2f}"]
        row += _each([OURS], runs, lambda own: f"{_median(own, 'of_floor'):.0%}")
        rows.append(row)
    return _table(head, rows)


def _online(cells: Cells) -> str:
    engines = _engines(cells)
    names = ["TTFT p50, ms", "TTFT p99", "ITL p50", "ITL p99"]
    rows = [
        [
            workload.removeprefix(ONLINE),
            name,
            *(f"{_median(runs[name], key):.1f}" for key in LATENCIES),
        ]
        for workload, runs in cells.items()
        for name in engines
        if name in runs
    ]
    return _table(["requests/s", "engine", *names], rows)


def _cells(lines: Iterable[Line], online: bool) -> Cells:
    cells: Cells = {}
    for line in lines:
        if line["workload"].startswith(ONLINE) == online:
            cells.setdefault(line["workload"], {}).setdefault(line["engine"], []).append(line)
    return cells


def _engines(cells: Cells) -> list[str]:
    found = dict.fromkeys(name for runs in cells.values() for name in runs)
    return sorted(found, key=lambda name: name != OURS)


def _each(
    engines: Sequence[str], runs: dict[str, list[Line]], cell: Callable[[list[Line]], str]
) -> list[str]:
    return [cell(runs[name]) if name in runs else "-" for name in engines]


def _ratio(runs: dict[str, list[Line]], engine: str) -> str:
    value = ratio(runs, engine)
    return "-" if value is None else f"{value:.2f}"


def _median(lines: list[Line], key: str) -> float:
    return float(median(line[key] for line in lines))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
