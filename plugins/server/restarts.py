"""When another front end is started for one that died."""

FIRST_S, MOST_S = 0.5, 30.0
STEADY_S = 60.0  # one that lived for so long could work
TRIES = 5


class Restarts:
    """After FIRST_S, and twice as long for each further one that died young, up to MOST_S."""

    def __init__(self) -> None:
        self._young = 0  # deaths in a row before STEADY_S
        self._due_s: list[float] = []

    @property
    def hopeless(self) -> bool:
        """TRIES of them died young, one after the other."""
        return self._young >= TRIES

    def died(self, lived_s: float, now_s: float) -> float:
        """Take note of a death; seconds until another is due."""
        self._young = 0 if lived_s >= STEADY_S else self._young + 1
        wait_s = min(FIRST_S * 2.0 ** max(self._young - 1, 0), MOST_S)
        self._due_s.append(now_s + wait_s)
        return wait_s

    def due(self, now_s: float) -> int:
        """How many to start now; each is told once."""
        late = [due_s for due_s in self._due_s if due_s > now_s]
        count = len(self._due_s) - len(late)
        self._due_s = late
        return count
