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
        while self.suspects and self.suspects[0].aborted:
            self.suspects.popleft()
        if self._inmate is not None or not self.suspects:
            self._keep(needed=self._inmate is not None)
            return None
        if self.replica is None:
            table = self._registry.table(now_s)
            if not len(table):
                return None
            self.replica = table.ids[int(np.argmin(table.requests))]
        free = self.replica in self._registry.table(now_s).ids
        if not free or self._registry.num_open(self.replica):
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

    def _keep(self, needed: bool) -> None:
        if not needed:
            self.replica = None
