"""Whether a launch's one-token rows begin with the same pages, told on the host from the block
table's updates: rows whose sequences share a prefix in the cache's tree hold the same page at the
same index."""

import numpy as np
from numpy.typing import NDArray

from core.launch import Int32, Launch

DEPTHS = (256, 1024, 4096)
"""Lengths of prefixes that are looked for, in tokens."""


class SharedPages:
    """The pages that table rows hold at a few depths. least: share of the rows' context that
    sharing must spare. forced: it is always worth it."""

    def __init__(self, num_rows: int, page_size: int, least: float = 0.05) -> None:
        self._least = least
        self.forced = False
        depths = [depth for depth in DEPTHS if depth >= page_size]
        self._tokens = np.array(depths, np.int64)
        self._indices = np.array([depth // page_size - 1 for depth in depths], np.int64)
        self._pages: NDArray[np.int32] = np.zeros((len(depths), num_rows), np.int32)

    def note(self, launch: Launch) -> None:
        """Apply a launch's changes of the block table."""
        for setup in launch.setups:
            self._pages[:, setup.row] = 0
        rows, indices, pages = launch.table_updates.T
        for depth, index in enumerate(self._indices.tolist()):
            at = np.flatnonzero(indices == index)
            if len(at):
                self._pages[depth, rows[at]] = pages[at]

    def worth_sharing(self, launch: Launch) -> bool:
        """Whether the tokens that one read for all would spare are `least` of the context."""
        if self.forced:
            return True
        count = launch.num_decode_rows
        rows = launch.row_ids[:count]
        total = int(launch.first_positions[:count].sum()) + count
        for depth, tokens in enumerate(self._tokens.tolist()):
            saved: int = _repeats(self._pages[depth, rows]) * tokens
            if saved >= self._least * total:
                return saved > 0
            if not saved:
                return False  # deeper prefixes begin with this one
        return False


def _repeats(pages: Int32) -> int:
    """How many of the pages occur before; page 0 = none."""
    held = np.sort(pages[pages > 0])
    return int((held[1:] == held[:-1]).sum())
