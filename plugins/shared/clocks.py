"""The clocks of an engine: wall-clock and simulated time (core.clock.Clock)."""

import time


class RealClock:
    """Monotonic wall-clock seconds since construction or the last `restart`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Count from zero again (after warm-up)."""
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    def wait_until(self, time_s: float) -> None:
        """Sleep until `time_s`."""
        delay = time_s - self.now()
        if delay > 0:
            time.sleep(delay)


class VirtualClock:
    """Simulated seconds; only `wait_until` moves them."""

    def __init__(self) -> None:
        self._now = 0.0

    def restart(self) -> None:
        """Count from zero again."""
        self._now = 0.0

    def now(self) -> float:
        """Simulated seconds since the run began."""
        return self._now

    def wait_until(self, time_s: float) -> None:
        """Jump to `time_s`; never backwards."""
        self._now = max(self._now, time_s)
