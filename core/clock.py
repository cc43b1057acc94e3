"""Time as an argument: the same engine runs in wall-clock and in simulated time."""

from typing import Protocol


class Clock(Protocol):
    """Seconds since the run began."""

    def now(self) -> float:
        """Seconds since the run began."""

    def wait_until(self, time_s: float) -> None:
        """Return once `now() >= time_s`; at once if it already is."""
