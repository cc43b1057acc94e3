"""How figures look and where they go: two widths, one colour a policy, PDF + PNG + the numbers."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

COLUMN_IN, FULL_IN = 3.3, 7.0  # a column and a page of a two-column paper
DPI = 300
COLOURS = (  # Okabe-Ito: distinct under colour blindness
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MUTED, GRID = "#555555", "#E6E6E6"
COLOUR_FILE = "colours.json"
CROWDED = 100  # an axis over more than two decades
POINTS_PER_LETTER, HANDLE_POINTS = 4.0, 34.0  # of a legend's entry
RC: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "svg.hashsalt": "tritium",
}


class Palette:
    """One policy-to-colour map for all figures of a folder, kept there in colours.json: a label has
    the colour, marker and line that it got first, whichever labels a later figure shows."""

    def __init__(self, labels: Iterable[str] = ()) -> None:
        self.labels = list(labels)

    @classmethod
    def of(cls, folder: Path) -> "Palette":
        """What the folder's earlier figures used."""
        path = folder / COLOUR_FILE
        return cls(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ())

    def save(self, folder: Path) -> None:
        """Keep it for the next figure."""
        text = json.dumps(self.labels, indent=2) + "\n"
        (folder / COLOUR_FILE).write_text(text, encoding="utf-8")

    def add(self, labels: Iterable[str]) -> None:
        """Give new labels the next free places, in alphabetical order."""
        self.labels += sorted(set(labels) - set(self.labels))

    def colour(self, label: str) -> str:
        """Of a label; a new one is added."""
        return COLOURS[self._place(label) % len(COLOURS)]

    def line(self, label: str) -> dict[str, Any]:
        """Colour, marker and line style for Axes.plot."""
        place = self._place(label)
        turn = place // len(COLOURS)
        return {
            "color": COLOURS[place % len(COLOURS)],
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": LINES[turn % len(LINES)],
        }

    def _place(self, label: str) -> int:
        self.add([label])
        return self.labels.index(label)


@contextmanager
def drawing(width_in: float, height_in: float) -> Iterator[Figure]:
    """A figure of a paper's size; settings hold within the block alone."""
    with mpl.rc_context(RC):
        yield Figure(figsize=(width_in, height_in), layout="constrained")


def tidy(axes: Axes) -> None:
    """Two spines and a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, lw=0.5)
    axes.set_axisbelow(True)


def legend(figure: Figure, extra: Sequence[tuple[Any, str]] = ()) -> None:
    """One for all axes, above them, each label once; nothing where nothing is labelled."""
    found = {label: handle for handle, label in extra}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        longest = max(map(len, found))
        columns = int(figure.get_figwidth() * 72 / (longest * POINTS_PER_LETTER + HANDLE_POINTS))
        figure.legend(
            list(found.values()),
            list(found),
            loc="outside upper left",
            ncols=min(max(columns, 1), len(found)),
            frameon=False,
            borderaxespad=0,
            handlelength=1.8,
            columnspacing=1.0,
        )


def log_ticks(axis: Axis) -> None:
    """Powers of ten written out, and 2 and 5 of each where they have room."""

    def between(value: float, _: int) -> str:
        low, high = axis.get_view_interval()
        return f"{value:g}" if high < low * CROWDED else ""

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.set_minor_formatter(FuncFormatter(between))


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.pdf and stem.png; the same figure gives the same bytes."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("pdf", "png")]
    with mpl.rc_context(RC):
        figure.savefig(paths[0], metadata={"CreationDate": None})
        figure.savefig(paths[1], dpi=DPI)
    return paths


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """The numbers drawn; None as an empty field."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path
