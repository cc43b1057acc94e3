"""The latest tokens of sequences, in arrays over table slots.

A step then appends all its tokens at once; a sequence takes its own over (`write_out`) when someone
needs them, or when its place here is full. A few sequences get theirs at once."""

import numpy as np

from core.launch import Floats, Int32, Int64
from core.request import Sequence

MOST = 64  # tokens a slot holds
FEW = 24  # sequences for which arrays are slower than one after another


class RecentTokens:
    """Tokens int32, times float64 and steps int64 [MOST * capacity], the n-th of all slots side by
    side (one flat index is the fastest way to scatter), and how many a slot has."""

    def __init__(self, capacity: int) -> None:
        self.count = np.zeros(capacity, np.int32)
        self._held = False  # whether anything was ever kept here
        self._tokens = np.zeros(MOST * capacity, np.int32)
        self._times_s = np.zeros(MOST * capacity, np.float64)
        self._steps = np.zeros(MOST * capacity, np.int64)

    def double(self) -> None:
        """Make room for twice the slots."""
        for name in ("_tokens", "_times_s", "_steps", "count"):  # count last: the stride
            column = getattr(self, name).reshape(-1, len(self.count))
            setattr(self, name, np.concatenate([column, np.zeros_like(column)], axis=1).ravel())

    def append(
        self, slots: Int64, sequences: list[Sequence], tokens: Int32, times_s: Floats, step: int
    ) -> None:
        """The sequences in `slots` got tokens [len(slots), k], k <= MOST, at times_s [k], in steps
        from `step` on."""
        num = tokens.shape[1]
        if num > 1 or len(sequences) <= FEW:
            times, steps = times_s.tobytes(), np.arange(step, step + num).tobytes()
            for sequence in sequences if self._held else ():
                self.write_out(sequence)
            for sequence, own in zip(sequences, tokens, strict=True):
                sequence.tokens.frombytes(own.tobytes())
                sequence.record.times_s.frombytes(times)
                sequence.record.steps.frombytes(steps)
            return
        for index in (self.count[slots] == MOST).nonzero()[0].tolist():
            self.write_out(sequences[index])
        count = self.count[slots]
        where = count * np.int64(len(self.count)) + slots
        self._tokens[where] = tokens[:, 0]
        self._times_s[where], self._steps[where] = times_s, step
        self._held = True
        self.count[slots] = count + np.int32(1)

    def write_out(self, sequence: Sequence) -> None:
        """Hand a sequence its tokens, and its record their times and steps."""
        slot, record, capacity = sequence.slot, sequence.record, len(self.count)
        if num := int(self.count[slot]) if self._held else 0:
            kept = slice(slot, num * capacity, capacity)
            sequence.tokens.frombytes(self._tokens[kept].tobytes())
            record.times_s.frombytes(self._times_s[kept].tobytes())
            record.steps.frombytes(self._steps[kept].tobytes())
            self.count[slot] = 0
