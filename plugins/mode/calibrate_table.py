"""What mode calibrate prints of a calibration."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plugins.mode.calibrate_traffic import STRETCH
from plugins.shared.calibration import UNITS, Calibration

PLAIN_WIDTH = 100  # columns when the output is no terminal
ABSENT = "–"


def show(found: Calibration, paths: Sequence[Path]) -> None:
    """Print coefficients, host times and errors, and where the file is."""
    terminal = Console()
    if not terminal.is_terminal:
        terminal = Console(width=PLAIN_WIDTH)
    terminal.print(f"[bold]{escape(found.model)}[/] on {escape(found.device)}", highlight=False)
    costs = Table(box=SIMPLE_HEAD, pad_edge=False)
    costs.add_column("term", style="cyan")
    for name in found.forms:
        costs.add_column(name, justify="right")
    costs.add_column("unit")
    forms = found.forms.values()
    ends = [f"{one.base_s[0]:.3g} - {one.base_s[-1]:.3g}" for one in forms]
    spans = [f"{one.tokens[0]} - {one.tokens[-1]}" for one in forms]
    costs.add_row("base", *ends, "s")
    costs.add_row("of", *spans, "tokens")
    for name, unit in UNITS.items():
        costs.add_row(name, *(f"{one.terms[name]:.3g}" for one in forms), unit)
    terminal.print(costs)
    host = Table(box=SIMPLE_HEAD, pad_edge=False)
    host.add_column("host", style="cyan")
    host.add_column("seconds", justify="right")
    host.add_row("a step", f"{found.host_s:.3g}")
    host.add_row("a row", f"{found.host_row_s:.3g}")
    host.add_row("a sequence admitted", f"{found.host_new_s:.3g}")
    for kind, values in found.launch_s.items():
        host.add_row(f"launch, {kind}", f"{fmean(values):.3g}")
    terminal.print(host)
    errors = Table(box=SIMPLE_HEAD, pad_edge=False)
    errors.add_column("error of", style="cyan")
    for name in ("steps", "mean", "p90", "max"):
        errors.add_column(name, justify="right")
    for label, one in (
        ("steps fitted", found.fit),
        ("steps held out", found.test),
        (f"{STRETCH} steps of a run", found.traffic),
    ):
        shares = [ABSENT if x is None else f"{100 * x:.1f} %" for x in (one.mape, one.p90, one.max)]
        errors.add_row(label, f"{one.points}", *shares)
    terminal.print(errors)
    if found.skipped:
        terminal.print(f"{found.skipped} steps of the grid do not fit the engine")
    terminal.print(f"written: {escape(', '.join(map(str, paths)))}", soft_wrap=True)
