"""Models of clients as ServeGen publishes them: arrivals by ten minutes, lengths by six hours.

Source: alibaba/ServeGen (Apache-2.0), arXiv:2505.09999; data/traces/README.md has the format.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plugins.workload.common import TRACES, read_jsonl

WINDOW_S = 600.0
PERIOD_S = 21_600.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """A distribution of lengths: tokens int64 ascending, and their cumulated shares."""

    tokens: NDArray[np.int64]
    cumulated: NDArray[np.float64]

    def draw(self, num: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """int64 [num], each >= 1."""
        places = np.searchsorted(self.cumulated, generator.random(num), side="right")
        return np.maximum(1, self.tokens[np.minimum(places, len(self.tokens) - 1)])


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Ten minutes of a client. num: requests in them. family: of the gaps between arrivals, Gamma
    or Weibull, with that shape."""

    start_s: float
    num: int
    family: str
    shape: float

    @property
    def period_s(self) -> float:
        """The six hours that it is part of: when they begin."""
        return self.start_s // PERIOD_S * PERIOD_S

    def arrivals(self, generator: np.random.Generator) -> NDArray[np.float64]:
        """Seconds of the day, float64 [num], ascending: gaps of the fitted shape, scaled so that
        the requests fill the window (one gap more than requests: the last is to its end)."""
        families: dict[str, Callable[..., NDArray[np.float64]]] = {
            "Gamma": generator.gamma,
            "Weibull": generator.weibull,
        }
        ends = np.cumsum(families[self.family](self.shape, size=self.num + 1))
        arrived = self.start_s + WINDOW_S * ends[:-1] / ends[-1]
        # A last gap may be too short for float64 to tell from none.
        before_end = np.nextafter(self.start_s + WINDOW_S, 0)
        inside: NDArray[np.float64] = np.minimum(arrived, before_end)
        return inside


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """Windows with requests, in order, and by start of its six hours the published text of the
    distributions of prompt and output lengths; no texts: not published."""

    number: int
    windows: tuple[Window, ...]
    texts: dict[float, tuple[str, str]]

    def lengths(self) -> dict[float, tuple[Lengths, Lengths]]:
        """Prompts and outputs of the six hours that its windows are part of."""
        periods = sorted({window.period_s for window in self.windows})
        return {at: (_lengths(self.texts[at][0]), _lengths(self.texts[at][1])) for at in periods}


def read_clients(dataset: str, start_s: float, end_s: float) -> list[Client]:
    """Clients that have requests in a part of the day, with the windows that touch it."""
    clients = []
    for _, entry in read_jsonl(TRACES / "servegen" / f"{dataset}.jsonl.gz", "workload data"):
        windows = tuple(
            Window(at_s, round(rate * WINDOW_S), family, shape)
            for at_s, rate, _, family, shape, _ in entry["windows"]
            if rate > 0 and start_s - WINDOW_S < at_s < end_s
        )
        texts = {
            float(at): (both["input_tokens"], both["output_tokens"])
            for at, both in (entry["dists"] or {}).items()
        }
        if windows:
            clients.append(Client(entry["client"], windows, texts))
    return clients


def _lengths(text: str) -> Lengths:
    """From the text of a dictionary, length: share."""
    pairs = np.array(text.strip("{}").replace(":", ",").split(","), np.float64).reshape(-1, 2)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    cumulated = np.cumsum(pairs[:, 1])
    return Lengths(pairs[:, 0].astype(np.int64), cumulated / cumulated[-1])
