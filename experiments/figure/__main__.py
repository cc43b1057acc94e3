"""Draws one figure of a paper from run folders, as PDF and PNG, with the numbers drawn as CSV.

    python -m experiments.figure KIND FOLDER [FOLDER ...] [--out figures]

KIND: latency_rate, attainment, goodput, cdf, over_time, hit_rate, fairness, pareto, ablation,
prediction, simulation, steps; the docstrings of the functions of these names say what each shows.
All figures of one --out folder share one policy-to-colour map, colours.json."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError
from experiments.figure import choices, distributions, fairness, memory, rates, times
from experiments.figure.options import Options, Slo
from experiments.figure.plots import Plot
from experiments.paper.folders import Run, find_runs
from experiments.paper.groups import BY
from experiments.paper.metrics import metric
from experiments.paper.style import COLUMN_IN, FULL_IN, Palette, drawing, save, write_csv

WIDTHS = {"column": COLUMN_IN, "full": FULL_IN}


@dataclass(frozen=True, slots=True)
class Kind:
    """What gathers a figure's data, and the width it is meant for."""

    gather: Callable[[Sequence[Run], Options], Plot]
    width: str = "column"


KINDS = {
    "latency_rate": Kind(rates.latency_rate, "full"),
    "attainment": Kind(rates.attainment),
    "goodput": Kind(rates.goodput),
    "cdf": Kind(distributions.cdf, "full"),
    "over_time": Kind(times.over_time),
    "hit_rate": Kind(memory.hit_rate),
    "fairness": Kind(fairness.fairness, "full"),
    "pareto": Kind(choices.pareto),
    "ablation": Kind(choices.ablation, "full"),
    "prediction": Kind(choices.prediction),
    "simulation": Kind(choices.simulation, "full"),
    "steps": Kind(times.steps, "full"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        runs, unfinished = find_runs(asked.folders)
        plot = KINDS[asked.kind].gather(runs, _options(asked))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    for note in (*(f"left out, never finished: {path}" for path in unfinished), *plot.notes):
        print(note, file=sys.stderr)
    width = asked.width or KINDS[asked.kind].width
    for path in write(plot, asked.out, asked.name or asked.kind, WIDTHS[width]):
        print(path)
    return 0


def write(plot: Plot, out: Path, name: str, width_in: float) -> list[Path]:
    """NAME.pdf, NAME.png and NAME.csv in the folder, which keeps the colours."""
    out.mkdir(parents=True, exist_ok=True)
    palette = Palette.of(out)
    palette.add(plot.labels())
    with drawing(width_in, plot.height_in) as figure:
        plot.draw(figure, palette)
        paths = save(figure, out / name)
    palette.save(out)
    return [*paths, write_csv(out / f"{name}.csv", plot.header, plot.rows())]


def _options(asked: argparse.Namespace) -> Options:
    return Options(
        x=asked.x,
        metrics=tuple(metric(name) for name in asked.metric or ()),
        by=tuple(asked.by or BY),
        baseline=asked.baseline,
        seed=asked.seed,
        measured=find_runs(asked.measured)[0] if asked.measured else (),
        slo=Slo(asked.ttft, asked.tpot, asked.itl, asked.attainment),
        window_s=asked.window,
        limit=asked.limit,
        closed_loop=asked.closed_loop,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m experiments.figure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("kind", choices=KINDS, metavar="KIND")
    add("folders", type=Path, nargs="+", metavar="FOLDER", help="runs or sweeps")
    add("--out", type=Path, default=Path("figures"), help="folder; default: figures")
    add("--name", help="of the files; default: the kind")
    add("--width", choices=WIDTHS, help="3.3 or 7 inches; default: the kind's own")
    add("--x", metavar="PATH", help="config path of the horizontal axis; default: the rate")
    add("--metric", action="append", help="repeatable; default: the kind's own")
    add("--by", action="append", metavar="PATH", help="config path that is compared, repeatable")
    add("--baseline", help="label that ablation and prediction compare with")
    add("--seed", type=int, help="of kinds that show one run; default: the lowest")
    add("--measured", type=Path, nargs="+", metavar="FOLDER", help="runs on a device: simulation")
    add("--ttft", type=float, help="SLO in seconds: attainment, goodput")
    add("--tpot", type=float, help="SLO in seconds")
    add("--itl", type=float, help="SLO in seconds, of a request's largest token gap")
    add("--attainment", type=float, default=0.9, help="share that must keep the SLO; 0.9")
    add("--window", type=float, help="seconds of a window: fairness")
    add("--limit", type=int, default=40, help="requests shown: steps")
    add("--closed-loop", action="store_true", help="arrival times may differ between policies")
    return parser


if __name__ == "__main__":
    sys.exit(main())
