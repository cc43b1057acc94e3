"""Compares policies: paired differences with intervals, a Pareto plot, the first differing step.

    python -m experiments.compare outputs/sweeps/FOLDER [--baseline fcfs] [--metric ttft_p99]

Runs are paired by seed and by all of their config but the policy (or --by PATH). Several seeds:
Student's t over the paired differences; one seed: a bootstrap over requests, and labelled so.
Writes differences.csv, compare.md, pareto.csv, pareto.pdf and pareto.png to --out."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError
from experiments.compare import pareto
from experiments.compare.differences import compare
from experiments.compare.first_step import describe, first_difference
from experiments.compare.report import HEADER, markdown, rows
from experiments.paper.folders import Run, find_runs
from experiments.paper.groups import BY, Group, arrange
from experiments.paper.metrics import METRICS, SHOWN, metric
from experiments.paper.style import COLUMN_IN, Palette, drawing, save, write_csv

DEFAULT = "default"  # the label of a run without `+policy=`


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        print(run(options))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> str:
    """Write the files; returns the report as Markdown."""
    found, unfinished = find_runs(options.folders)
    by = tuple(options.by or BY)
    groups = arrange(found, by)
    baseline = options.baseline or _baseline(groups, found)
    shown = [metric(name) for name in options.metric or SHOWN]
    result = compare(groups, shown, baseline, options.closed_loop)
    if not options.metric:  # of the usual ones, those that no run has are not worth a word
        absent = {one.label for one in shown} - {one.metric.label for one in result.differences}
        result.notes = [n for n in result.notes if n.partition(": no number")[0] not in absent]
    for folder in unfinished:
        result.note(f"left out, never finished: {folder}")
    report = markdown(result, baseline, _steps(groups, baseline))
    out = options.out or options.folders[0] / "compare"
    out.mkdir(parents=True, exist_ok=True)
    table = rows(result, baseline)
    write_csv(out / "differences.csv", HEADER, table)
    (out / "compare.md").write_text(report, encoding="utf-8")
    _pareto(groups, options.pareto, out)
    if options.wandb:
        from experiments.compare.wandb_run import log_comparison

        log_comparison(table, out, options.wandb, options.group or found[0].position[0] or None)
    return f"{report}\nWritten to {out}"


def _pareto(groups: Sequence[Group], names: Sequence[str], out: Path) -> None:
    x, y = map(metric, names)
    found = pareto.points(groups, x, y)
    palette = Palette.of(out)
    palette.add(point.policy for point in found)
    with drawing(COLUMN_IN, 2.4) as figure:
        pareto.draw(found, x, y, palette, figure)
        save(figure, out / "pareto")
    palette.save(out)
    write_csv(out / "pareto.csv", pareto.HEADER, (point.row() for point in found))


def _steps(groups: Sequence[Group], baseline: str) -> list[str]:
    """Of each policy: the first pair of runs, by setting and seed, whose decisions differ."""
    lines: list[str] = []
    policies = dict.fromkeys(label for group in groups for label in group.runs)
    for policy in policies:
        pairs = _pairs(groups, baseline, policy)
        if policy != baseline and pairs:
            lines += [f"### {baseline} and {policy}", "", *_step(pairs), ""]
    return lines


def _step(pairs: Sequence[tuple[str, Run, Run]]) -> list[str]:
    lines: list[str] = []
    for where, base, own in pairs:
        try:
            found = first_difference(base, own)
        except ConfigError as error:
            return [*lines, f"{where}: not known: {error}."]
        lines += [f"{where}:", "", *describe(found)]
        if not isinstance(found, int):
            break
    return lines


def _pairs(groups: Sequence[Group], baseline: str, policy: str) -> list[tuple[str, Run, Run]]:
    return [
        (f"{group.setting} seed {seed}".strip(), group.runs[baseline][seed], run)
        for group in groups
        for seed, run in sorted(group.runs.get(policy, {}).items())
        if seed in group.runs.get(baseline, {})
    ]


def _baseline(groups: Sequence[Group], found: Sequence[Run]) -> str:
    """`default` if there is one, else the label of the first run of the sweep."""
    labels = {
        id(run): label for g in groups for label, runs in g.runs.items() for run in runs.values()
    }
    return DEFAULT if DEFAULT in labels.values() else labels[id(found[0])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m experiments.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="runs or sweeps")
    parser.add_argument(
        "--baseline", help="label to compare with; default: `default`, else the sweep's first"
    )
    parser.add_argument(
        "--metric",
        action="append",
        help=f"repeatable: {', '.join(METRICS)}, or a dotted path of summary.json",
    )
    parser.add_argument(
        "--by",
        action="append",
        metavar="PATH",
        help="config path that is compared, repeatable; default: plugins (what +policy= fills)",
    )
    parser.add_argument(
        "--pareto",
        nargs=2,
        metavar=("X", "Y"),
        default=("output_tokens_per_s", "e2e_p99"),
        help="metrics of the Pareto plot",
    )
    parser.add_argument(
        "--closed-loop", action="store_true", help="arrival times may differ between policies"
    )
    parser.add_argument("--wandb", metavar="PROJECT", help="log it as a run there, too")
    parser.add_argument("--group", help="of that run; default: the first run's sweep")
    parser.add_argument("--out", type=Path, help="default: FOLDER/compare")
    return parser


if __name__ == "__main__":
    sys.exit(main())
