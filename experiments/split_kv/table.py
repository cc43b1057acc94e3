"""Split decode against a single pass, from a log of experiments.kernels.bench:
python -m experiments.split_kv.table split.jsonl."""

import json
import sys
from pathlib import Path

from experiments.kernels.report import OURS, Line, Log
from experiments.paper.cells import markdown

ONE_PASS = "one_pass"
HEADER = ("rows x context", "one pass, µs", "split, µs", "times faster", "TB/s, one pass and split")
TITLES = {"decode": "Launches included", "graph": "Inside a graph, a layer"}


def main(log: Path) -> str:
    """A table each for eager calls and for those inside a graph, where the log has them."""
    found = Log(map(json.loads, log.read_text(encoding="utf-8").splitlines()))
    parts = []
    for kind, title in TITLES.items():
        rows = [row(case, lines) for case, lines in found.cases(kind).items() if ONE_PASS in lines]
        if rows:
            parts.append(f"{title}\n\n{markdown(HEADER, rows)}")
    return "\n\n".join([f"{found.device['device']}", *parts])


def row(case: str, lines: dict[str, Line]) -> list[str]:
    """One case; `-` where the split kernel failed."""
    one, split = lines[ONE_PASS], lines.get(OURS)
    if split is None:
        return [case, f"{one['us']:.1f}", "-", "-", f"{one['tb_s']:.2f}, -"]
    times = f"{one['us'] / split['us']:.2f}"
    rates = f"{one['tb_s']:.2f}, {split['tb_s']:.2f}"
    return [case, f"{one['us']:.1f}", f"{split['us']:.1f}", times, rates]


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
