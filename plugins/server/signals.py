"""SIGTERM and SIGINT as a count, and a descriptor that wakes who polls."""

import os
import signal
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """count: stop signals so far, `stop` among them. The second one raises SystemExit(1), wherever
    the main thread is. Open and close it there; catch=False leaves signals alone."""

    def __init__(self, catch: bool = True) -> None:
        self.count = 0
        self.descriptor, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, Any] = {}
        if catch:
            self._before = {one: signal.signal(one, self._caught) for one in STOP_SIGNALS}

    def stop(self) -> None:
        """As a signal does. May be called from any thread."""
        self.count += 1
        os.write(self._write_end, b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        os.read(self.descriptor, 4096)

    def close(self) -> None:
        """Give the signals back to their former handlers."""
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}
        os.close(self.descriptor)
        os.close(self._write_end)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.stop()
        if self.count == 2:
            raise SystemExit(1)
