"""The latest tokens of sequences, in arrays over table slots.

A step then appends all its tokens at once; a sequence takes its own over (`write_out`) when someone
needs them, or when its place here is full."""

import numpy as np
from numpy.typing import NDArray

from core.request import Sequence

Slots = NDArray[np.int64]
MOST = 64  # tokens a slot holds


class RecentTokens:
    """Tokens int32, times float64 and steps int64 [capacity, MOST], and how many a slot has."""

    def __init__(self, capacity: int) -> None:
        self.count = np.zeros(capacity, np.int32)
        self._tokens = np.zeros((capacity, MOST), np.int32)
        self._times_s = np.zeros((capacity, MOST), np.float64)
        self._steps = np.zeros((capacity, MOST), np.int64)

    def double(self) -> None:
        """Make room for twice the slots."""
        for name in ("count", "_tokens", "_times_s", "_steps"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def append(
        self,
        slots: Slots,
        sequences: list[Sequence],
        tokens: NDArray[np.int32],
        times_s: NDArray[np.float64],
        steps: NDArray[np.int64],
    ) -> None:
        """The sequences in `slots` got tokens [len(slots), k], k <= MOST, at times_s [k] in steps
        [k]."""
        num = tokens.shape[1]
        for index in (self.count[slots] > MOST - num).nonzero()[0].tolist():
            self.write_out(sequences[index])
        count = self.count[slots]
        where = slots[:, None], count[:, None] + np.arange(num)
        self._tokens[where], self._times_s[where], self._steps[where] = tokens, times_s, steps
        self.count[slots] = count + num

    def write_out(self, sequence: Sequence) -> None:
        """Hand a sequence its tokens, and its record their times and steps."""
        slot = sequence.slot
        num = int(self.count[slot])
        if num:
            sequence.tokens.frombytes(self._tokens[slot, :num].tobytes())
            sequence.record.times_s.frombytes(self._times_s[slot, :num].tobytes())
            sequence.record.steps.frombytes(self._steps[slot, :num].tobytes())
            self.count[slot] = 0
