"""Tables and a figure from a log of experiments/kernels/bench.py.

    python -m experiments.kernels.report bench.jsonl [--readme FILE] [--figure FILE]

Replaces what stands in the README between `<!-- bench:NAME -->` and `<!-- /bench -->` by the table
of that name (device, decode, prefill, graph, planner), where the log has one, and draws decode and
prefill."""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from experiments.kernels.roofline import ratios

HERE = Path(__file__).parent
OURS = "tritium"
COLUMNS = {
    "fa3": "FA3",
    "flashinfer": "FlashInfer",
    "vllm_triton": "vLLM Triton",
    "FlexAttention": "FlexAttention, contiguous",
    "torch SDPA (cuDNN)": "torch SDPA (cuDNN), contiguous",
    OURS: "this repository",
}
RIVALS = ("fa3", "flashinfer")
MARKED = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

Line = dict[str, Any]


class Log:
    """A benchmark's lines, by kind and case in their order."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = list(lines)
        device = self.of("device")
        if len(device) != 1:
            raise ValueError(f"the log must hold one line of kind device, got {len(device)}")
        self.device = device[0]

    def of(self, kind: str) -> list[Line]:
        """Lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    def cases(self, kind: str) -> dict[str, dict[str, Line]]:
        """Case -> implementation -> its line, where it ran."""
        found: dict[str, dict[str, Line]] = {}
        for line in self.of(kind):
            by_name = found.setdefault(line["case"], {})
            if "failure" not in line:
                by_name[line["name"]] = line
        return found


def main() -> None:
    """Write what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--figure", type=Path, default=HERE / "attention.png")
    arguments = parser.parse_args()
    log = Log(map(json.loads, arguments.log.read_text().splitlines()))
    text = arguments.readme.read_text()
    arguments.readme.write_text(filled(text, tables(log)))
    draw(log, arguments.figure)


def tables(log: Log) -> dict[str, str]:
    """Markdown by name, of what the log has."""
    facts = log.device
    made = {
        "device": f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}; copy "
        f"{facts['copy_tb_s']:.2f} TB/s, bfloat16 matrix product {facts['matmul_tflops']:.0f} "
        f"TFLOP/s in the same run.\n"
    }
    units: dict[str, Callable[[Line], str]] = {
        "decode": lambda line: f"{line['us']:.1f}",
        "prefill": lambda line: f"{line['us']:.0f} ({line['tflops']:.0f})",
        "graph": lambda line: f"{line['us']:.1f}",
    }
    for kind, cell in units.items():
        if cases := log.cases(kind):
            made[kind] = _attention(cases, cell)
    if cases := log.cases("planner"):
        rows = [[case, f"{lines['default']['us']:.1f}"] for case, lines in cases.items()]
        made["planner"] = _table(["batch", "µs"], rows)
    return made


def filled(text: str, made: dict[str, str]) -> str:
    """text with the tables at their marks. Raises ValueError for a table without its mark."""
    missing = set(made) - {name for _, name, _ in MARKED.findall(text)}
    if missing:
        raise ValueError(f"the README must hold <!-- bench:NAME --> for {sorted(missing)}")
    return MARKED.sub(lambda m: m[1] + made.get(m[2], m[0][len(m[1]) : -len(m[3])]) + m[3], text)


def draw(log: Log, path: Path) -> None:
    """Two panels: decode's share of copy bandwidth, prefill's TFLOP/s, by implementation."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    copy = log.device["copy_tb_s"]
    figure, axes = plt.subplots(2, 1, figsize=(9, 7), layout="constrained")
    panels = (
        ("decode", "share of copy bandwidth", lambda line: line["tb_s"] / copy),
        ("prefill", "TFLOP/s", lambda line: line["tflops"]),
    )
    for axis, (kind, label, value) in zip(axes, panels, strict=True):
        cases = log.cases(kind)
        names = [name for name in COLUMNS if any(name in lines for lines in cases.values())]
        width = 0.85 / max(1, len(names))
        for i, name in enumerate(names):
            at = [x for x, lines in enumerate(cases.values()) if name in lines]
            heights = [value(lines[name]) for lines in cases.values() if name in lines]
            places = [x + (i - (len(names) - 1) / 2) * width for x in at]
            axis.bar(places, heights, width, label=COLUMNS[name])
        axis.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=8)
        axis.set_ylabel(label)
        axis.set_title(kind, loc="left")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=8, ncols=3, loc="lower right")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _attention(cases: dict[str, dict[str, Line]], cell: Callable[[Line], str]) -> str:
    names = [name for name in COLUMNS if any(name in lines for lines in cases.values())]
    rows = []
    for case, lines in cases.items():
        row = [case, *(cell(lines[name]) if name in lines else "-" for name in names)]
        mine = lines.get(OURS)
        row.append("-" if mine is None else f"{mine['tb_s']:.2f}, {mine['tflops']:.0f}")
        row.append("-" if mine is None else f"{mine['roofline']:.0%}")
        rows.append([*row, _ratio(lines)])
    last = ["TB/s, TFLOP/s", "of the roofline", "to the better of FA3, FlashInfer [min, max]"]
    return _table(["case", *(COLUMNS[name] for name in names), *last], rows)


def _ratio(lines: dict[str, Line]) -> str:
    rivals = [lines[name]["rounds_us"] for name in RIVALS if name in lines]
    if not rivals or OURS not in lines:
        return "-"
    pairs = ratios(lines[OURS]["rounds_us"], *rivals)
    return f"{statistics.median(pairs):.3f} [{min(pairs):.3f}, {max(pairs):.3f}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
