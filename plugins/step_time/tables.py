"""Published measurements as curves of a step's time (plugins/step_time/data/README.md)."""

import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parent / "data"
Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds against a count; float64 [n] each, counts ascending. Linear between two points, the
    first's value below it; beyond the last in proportion to the count, as arithmetic grows."""

    counts: Float
    seconds: Float

    def at(self, count: Any) -> Any:
        """Seconds for a number or an array."""
        inside = np.interp(count, self.counts, self.seconds)
        return inside * np.maximum(count / self.counts[-1], 1.0)


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Through the medians of what was measured at the same count; (count, seconds) in any order."""
    found = defaultdict(list)
    for count, seconds in points:
        found[count].append(seconds)
    counts = sorted(found)
    medians = [median(found[count]) for count in counts]
    return Curve(np.array(counts, np.float64), np.array(medians, np.float64))


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV file, gzipped or not."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    yield from csv.DictReader(io.StringIO(content.decode("utf-8")))
