"""Search for the highest rate at which a run still meets its SLO: bracket, then bisect."""

import math
from dataclasses import dataclass, field

from core.config import require

DIGITS = 3  # of a rate: short names, and the same folders in the next try


@dataclass(slots=True)
class Search:
    """One search. low, high: first rates tried. tolerance: it ends when the lowest rate that fails
    is at most so much above the highest that meets, relative to it. max_probes: or after so many.

    It assumes that whoever meets the SLO at a rate meets it at lower ones: the answer is the
    highest rate that met it below every one that failed."""

    low: float = 1.0
    high: float = 16.0
    tolerance: float = 0.05
    max_probes: int = 16
    tried: dict[float, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(0 < self.low < math.inf, "hydra.sweeper.low", "> 0", self.low)
        rule = f"above hydra.sweeper.low ({self.low})"
        require(self.low < self.high < math.inf, "hydra.sweeper.high", rule, self.high)
        require(self.tolerance > 0, "hydra.sweeper.tolerance", "> 0", self.tolerance)
        require(self.max_probes >= 2, "hydra.sweeper.max_probes", ">= 2", self.max_probes)

    @property
    def meets(self) -> float | None:
        """The highest rate that met the SLO below every one that failed; None so far none did."""
        failing = self.fails
        below = [
            rate for rate, met in self.tried.items() if met and (not failing or rate < failing)
        ]
        return max(below, default=None)

    @property
    def fails(self) -> float | None:
        """The lowest rate that failed; None so far none did."""
        return min((rate for rate, met in self.tried.items() if not met), default=None)

    @property
    def settled(self) -> bool:
        """Whether both ends of the bracket are known and close enough."""
        meets, fails = self.meets, self.fails
        return meets is not None and fails is not None and self._close(meets, fails)

    def next_rate(self) -> float | None:
        """What to try now; None when it is settled, or no more may be tried."""
        if self.settled or len(self.tried) >= self.max_probes:
            return None
        meets, fails = self.meets, self.fails
        if meets is None and fails is None:
            return rounded(self.low)
        if meets is None:
            assert fails is not None
            return rounded(fails / 2)
        if fails is None:
            return rounded(self.high if meets < self.high else meets * 2)
        middle = rounded(math.sqrt(meets * fails))
        return middle if meets < middle < fails else None

    def tell(self, rate: float, met: bool) -> None:
        """The result of a rate."""
        self.tried[rate] = met

    def _close(self, meets: float, fails: float) -> bool:
        return fails <= meets * (1 + self.tolerance)


def rounded(rate: float) -> float:
    """To DIGITS significant digits."""
    return float(f"{rate:.{DIGITS}g}")
