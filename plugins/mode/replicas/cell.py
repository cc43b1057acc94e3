"""Quarantine: requests that may have killed replicas run one at a time, with nobody beside them."""

from collections import deque

import numpy as np

from plugins.mode.replicas.streams import Stream
from plugins.shared.replica_registry import Registry


class Cell:
    """suspects: streams that wait to run alone. replica: kept for them, None = none is; it gets no
    other requests, and the one that runs there starts when it has ended what it had."""

    def __init__(self, registry: Registry) -> None:
        self.suspects: deque[Stream] = deque()
        self.replica: str | None = None
        self._registry = registry
        self._inmate: Stream | None = None

    def add(self, stream: Stream) -> None:
        """A stream shall run alone."""
        self.suspects.append(stream)

    def next(self, now_s: float) -> tuple[Stream, str] | None:
        """A stream to send now, and where; the caller sends it. None: nobody can go yet."""
        if self._inmate is not None:
            return None
        self.replica = self._choose(now_s) if self.suspects else None
        if self.replica is None or self._registry.num_open(self.replica):
            return None
        self._inmate = self.suspects.popleft()
        self._inmate.alone = True
        return self._inmate, self.replica

    def ended(self, stream: Stream) -> None:
        """A stream is over, or was taken from its replica."""
        if stream is self._inmate:
            self._inmate = None

    def lost(self, replica: str) -> None:
        """A replica died."""
        if replica == self.replica:
            self.replica = None

    def _choose(self, now_s: float) -> str | None:
        """The replica that is kept, while it takes requests, else the one with fewest."""
        table = self._registry.table(now_s)
        if self.replica in table.ids:
            return self.replica
        return table.ids[int(np.argmin(table.requests))] if len(table) else None
