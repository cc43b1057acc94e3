"""Mode explain: why did a request wait? Reads a finished run's folder; needs no model."""

import csv
import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.config import require
from core.errors import ConfigError
from plugins.mode.story import Event, counted, tell, told_routes
from plugins.shared.session import Session

PLAIN_WIDTH = 120  # columns when the output is no terminal


class Explain:
    """Tells the life of `request` in the run of folder `run`, step by step, equal steps merged."""

    def __init__(self, run: str, request: str) -> None:
        self.folder = Path(run).expanduser()
        self.request = request

    def run(self, session: Session) -> dict[str, Any]:
        """Print the story; returns its events. Raises ConfigError for a folder without records or
        an id that is not in them."""
        require(self.folder.is_dir(), "run", "the folder of a run", str(self.folder))
        for name in ("requests.csv", "steps.jsonl"):
            rule = f"a run folder with {name} (records=full)"
            require((self.folder / name).is_file(), "run", rule, str(self.folder))
        rows = read_requests(self.folder / "requests.csv")
        row = rows.get(self.request)
        events = tell(self.request, row, read_lines(self.folder / "steps.jsonl"))
        routes = self.folder / "routes.jsonl"
        if routes.is_file():  # of several replicas, whose steps are not recorded
            events[1:1] = told_routes(self.request, read_lines(routes))
        if row is None and not events:
            raise ConfigError(_unknown(self.request, list(rows)))
        _print(self.request, row, events)
        return {
            "name": f"explain {self.request}",
            "mode": "explain",
            "run": str(self.folder),
            "request": self.request,
            "events": [event.fields() for event in events],
        }


def read_requests(path: Path) -> dict[str, dict[str, str]]:
    """requests.csv by request id; every value as text, "" = never happened."""
    with open(path, encoding="utf-8", newline="") as lines:
        return {row["request_id"]: row for row in csv.DictReader(lines)}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of steps.jsonl or routes.jsonl, one at a time. A last line cut short by a crash is
    left out."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if line.endswith("\n"):
                    raise ConfigError(f"{path} must hold one JSON object a line") from None


def _unknown(request: str, known: list[str]) -> str:
    near = difflib.get_close_matches(request, known, n=3, cutoff=0.5)
    names = ", ".join(near or known[:3])
    hint = f"did you mean {names}?" if near else f"there are {names}, ..."
    return f"request must be one of the run's {len(known)} requests, got {request!r}; {hint}"


def _print(request: str, row: dict[str, str] | None, events: list[Event]) -> None:
    terminal = Console()
    if not terminal.is_terminal:
        terminal = Console(width=PLAIN_WIDTH)
    terminal.print(f"[bold]{escape(request)}[/]: {_headline(row)}", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("time (s)", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("what", style="cyan", no_wrap=True)
    table.add_column("why")
    for event in events:
        table.add_row(event.times(), event.span(), event.what, escape(event.why))
    terminal.print(table)


def _headline(row: dict[str, str] | None) -> str:
    if row is None:
        return "did not end in this run"
    parts = [
        counted(row["prompt_tokens"], "prompt token"),
        counted(row["output_tokens"], "output token"),
    ]
    for name, label in (
        ("queue_s", "waited"),
        ("ttft_s", "first token after"),
        ("e2e_s", "ended after"),
    ):
        if row[name]:
            parts.append(f"{label} {float(row[name]):.3f} s")
    if int(row["preemptions"]):
        parts.append(f"preempted {counted(row['preemptions'], 'time')}")
    return ", ".join([*parts, f"finish reason {row['finish_reason']}"])
