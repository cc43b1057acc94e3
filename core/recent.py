"""The latest tokens of sequences, in arrays over table slots.

A step then appends all its tokens at once; a sequence takes its own over (`write_out`) when someone
needs them, or when its place here is full."""

from typing import Any

import numpy as np

from core.launch import Floats, Int32, Int64
from core.request import Sequence

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
        self, slots: Int64, sequences: list[Sequence], tokens: Int32, times_s: Floats, step: int
    ) -> None:
        """The sequences in `slots` got tokens [len(slots), k], k <= MOST, at times_s [k], in steps
        from `step` on."""
        num = tokens.shape[1]
        for index in (self.count[slots] > MOST - num).nonzero()[0].tolist():
            self.write_out(sequences[index])
        count = self.count[slots]
        where: Any = slots, count  # one-dimensional scatters are faster
        if num > 1:
            where = slots[:, None], count[:, None] + np.arange(num)
        self._tokens[where] = tokens[:, 0] if num == 1 else tokens
        self._times_s[where], self._steps[where] = times_s, np.arange(step, step + num)
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
