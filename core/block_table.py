"""Rows of the block table: the pages in each, which the device knows, and when it is free again."""

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class BlockTable:
    """`pages` int32 [num_rows, max_pages]: of each row, in sequence order."""

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.pages = np.zeros((num_rows, max_pages), np.int32)
        self._sent = np.zeros(num_rows, np.int32)  # entries of a row the device has
        self._free = list(range(num_rows - 1, -1, -1))
        self._last_launch = np.full(num_rows, -1, np.int64)
        self._retired: list[int] = []
        self._collected = -1

    @property
    def in_use(self) -> int:
        """Rows owned by a sequence or by a launch in flight."""
        return len(self.pages) - len(self._free)

    def open(self, pages: Int32) -> int:
        """A free row that begins with `pages`, none of which the device has."""
        row = self._free.pop()
        self.pages[row, : len(pages)] = pages
        self._sent[row] = 0
        return row

    def retire(self, row: int) -> None:
        """Its sequence has left: it is free once no launch in flight uses it."""
        free = self._last_launch[row] <= self._collected
        (self._free if free else self._retired).append(row)

    def launched(self, launch_id: int, rows: Int32) -> None:
        """`rows` are in use until `launch_id` is collected."""
        self._last_launch.put(rows, launch_id)

    def collected(self, launch_id: int) -> None:
        """Rows whose last launch is done may be reused."""
        self._collected = launch_id
        waiting, self._retired = self._retired, []
        for row in waiting:
            self.retire(row)

    def updates(self, rows: Int32, held: Int32) -> Int32:
        """Entries of `rows` the device lacks: int32 [num_updates, 3] of (row, page index, page)."""
        counts = held - self._sent[rows]
        grown = counts > 0
        rows, counts = rows[grown], counts[grown]
        if len(rows) == 0:
            return np.empty((0, 3), np.int32)
        first = np.add.accumulate(counts) - counts
        row = np.repeat(rows, counts)
        index = np.arange(len(row)) - np.repeat(first - self._sent[rows], counts)
        self._sent[rows] += counts
        return np.stack([row, index, self.pages[row, index]], axis=1).astype(np.int32)
