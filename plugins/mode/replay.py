"""Mode replay: a recorded run once more, from its folder, and again under other policies.

The run's own command line, as its manifest holds it, runs in a process of its own; the resolved
config must come out the same, and each step's decisions are compared with those recorded. Whatever
else the command line of mode=replay chooses (+policy=, batching=, engine.…) then replaces what the
recorded one chose: a second run, whose first different step is told with both reasons.

Only runs in simulated time can be repeated: there the same requests meet the same steps. A run in
real time depends on how long its steps took; simulate its setting with a calibrated step time
instead."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from core.config import require
from core.errors import ConfigError
from plugins.shared.first_step import Divergence, Step, describe, first_difference
from plugins.shared.session import Session

RUN = Path(__file__).resolve().parents[2] / "run.py"
FILES = ("config.yaml", "manifest.json", "summary.json", "steps.jsonl")
SETTLED = ("mode", "run", "hydra", "records", "progress", "name", "sinks", "sink", "device")
QUIET = ("records=full", "progress=false", "hydra.mode=RUN", "~sinks.figures", "~sinks.timeline")
IGNORED = ("name", "progress", "records", "sinks", "run", "mode")  # of configs: decide nothing
TOTALS = (
    ("output tokens/s", "throughput.output_tokens_per_s"),
    ("requests/s", "throughput.requests_per_s"),
    ("TTFT p50 (s)", "latency.ttft_s.p50"),
    ("TTFT p99 (s)", "latency.ttft_s.p99"),
    ("ITL p99 (s)", "latency.itl_s.p99"),
    ("E2E p50 (s)", "latency.e2e_s.p50"),
    ("E2E p99 (s)", "latency.e2e_s.p99"),
    ("hit rate", "hit_rate"),
    ("preemptions", "preemptions"),
    ("recompute tax", "recompute_tax"),
    ("steps", "steps.count"),
)
RULE_CLOCK = "a run in simulated time (clock=virtual); one in real time does not repeat itself"
PLAIN_WIDTH = 120  # columns when the output is no terminal
ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run's folder. label: its policies."""

    folder: Path
    label: str
    summary: dict[str, Any]
    manifest: dict[str, Any]
    config: dict[str, Any]

    def steps(self) -> Iterator[Step]:
        """Lines of steps.jsonl, one at a time."""
        with open(self.folder / "steps.jsonl", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


class Replay:
    """run: the folder of a finished run with records=full."""

    def __init__(self, run: str) -> None:
        self.folder = Path(run).expanduser()

    def run(self, session: Session) -> dict[str, Any]:
        """Repeat it, re-decide it if the command line asks for anything else, print and return what
        differed. Raises ConfigError for a folder that cannot be repeated."""
        recorded = read(self.folder)
        require(recorded.config.get("clock") == "virtual", "run", RULE_CLOCK, str(self.folder))
        alone = recorded.config.get("replicas", 1) == 1
        require(alone, "run", "of one engine: steps of replicas are not recorded", str(self.folder))
        given = recorded.manifest["overrides"]
        again = _run(kept(given), session.folder / "again", "recorded again")
        _check_config(recorded, again)
        repeated = _compared(recorded, again, "recorded", "again")
        found = {
            "name": f"replay {recorded.summary['name']}",
            "mode": "replay",
            "run": str(self.folder),
            "commit_differs": recorded.manifest.get("commit") != again.manifest.get("commit"),
            "reproduced": isinstance(repeated, int),
            "steps": repeated if isinstance(repeated, int) else None,
            "reproduction": _lines(repeated),
        }
        changes = kept(session.run.manifest.get("overrides", []))
        if changes:
            other = _run(merged(kept(given), changes), session.folder / "other", " ".join(changes))
            decided = _compared(again, other, again.label, _apart(other.label, again.label))
            found |= {
                "changes": changes,
                "difference": _lines(decided),
                "totals": {
                    name: [_select(one.summary, path) for one in (again, other)]
                    for name, path in TOTALS
                },
            }
        _print(found)
        return found


def read(folder: Path) -> Recorded:
    """A finished run. Raises ConfigError for a folder that is none, or has no steps."""
    require(folder.is_dir(), "run", "the folder of a run", str(folder))
    for name in FILES:
        rule = f"the folder of a finished run with {name} (records=full)"
        require((folder / name).is_file(), "run", rule, str(folder))
    summary, manifest = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("summary.json", "manifest.json")
    )
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return Recorded(folder, str(summary["policy"]), summary, manifest, config)


def kept(overrides: Sequence[str]) -> list[str]:
    """Of a command line, what decides anything."""
    return [one for one in overrides if _key(one) not in SETTLED or one == "mode=simulate"]


def merged(recorded: Sequence[str], changes: Sequence[str]) -> list[str]:
    """The recorded command line with changes: what is chosen again is replaced, and the settings of
    what it replaces go too."""
    keys = {_key(one, whole=True) for one in changes}
    inside = tuple("plugins." if key == "policy" else f"{key}." for key in keys)
    return [
        one
        for one in recorded
        if (key := _key(one, whole=True)) not in keys and not key.startswith(inside)
    ] + list(changes)


def _key(override: str, whole: bool = False) -> str:
    key = override.lstrip("+~").partition("=")[0]
    return key if whole else key.partition(".")[0]


def _run(overrides: Sequence[str], folder: Path, what: str) -> Recorded:
    command = [sys.executable, str(RUN), *overrides, *QUIET, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the run of {what} failed: {done.stderr.strip()}")
    return read(folder)


def _check_config(recorded: Recorded, again: Recorded) -> None:
    """The same command line may mean something else by now: files in conf/ change."""
    names = sorted({*recorded.config, *again.config} - {*IGNORED})
    differing = [name for name in names if recorded.config.get(name) != again.config.get(name)]
    require(
        not differing,
        "run",
        "a run whose command line still gives its config.yaml",
        f"{recorded.folder}, whose {', '.join(differing)} differ now",
    )


def _compared(base: Recorded, own: Recorded, first: str, second: str) -> Divergence | int:
    return first_difference(base.steps(), own.steps(), (first, second))


def _apart(label: str, other: str) -> str:
    return label if label != other else f"{label} (changed)"


def _lines(found: Divergence | int) -> list[str]:
    return [line for line in describe(found) if line]


def _select(summary: dict[str, Any], path: str) -> Any:
    value: Any = summary
    for key in path.split("."):
        value = (value or {}).get(key)
    return value


def _print(found: dict[str, Any]) -> None:
    terminal = Console()
    if not terminal.is_terminal:
        terminal = Console(width=PLAIN_WIDTH)
    show = terminal.print
    how = "the recorded decisions" if found["reproduced"] else "OTHER decisions"
    show(f"{found['run']}: repeated with {how}", highlight=False, markup=False)
    if found["commit_differs"]:
        show("the code has changed since: another commit", highlight=False)
    for line in found["reproduction"]:
        show(line, highlight=False, markup=False)
    if "changes" not in found:
        return
    show(f"\nchanged: {' '.join(found['changes'])}", highlight=False, markup=False)
    for line in found["difference"]:
        show(line, highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "recorded", "changed"):
        table.add_column(name, justify="right" if name else "left")
    for name, values in found["totals"].items():
        table.add_row(name, *(ABSENT if value is None else f"{value:,.4g}" for value in values))
    show(table)
