"""Of a simulation's one-token rows, how many context tokens several of them hold in the same pages.

A device's executor sees page ids (sharing.py); a simulation's launches have none. What rows share
follows from their tokens: a row that starts behind cached tokens holds the pages of whom it found
them from."""

from collections.abc import Sequence

import numpy as np

from core.launch import Int32, Launch
from core.table import some

BLOCK = 128
"""Tokens by which prefixes are compared."""


class SharedContext:
    """The blocks that table rows hold, as nodes of a tree of prefixes. A row has its cached blocks
    in common with the last one that computed the same tokens, and computes nodes of its own."""

    def __init__(self, num_rows: int) -> None:
        self._paths: dict[int, list[int]] = {}
        self._latest: dict[int, int] = {}  # by the hash of a prefix: its node
        self._nodes: dict[int, list[int]] = {}  # that hash, and how many rows hold it
        self._made = 0
        self._num_shared = 0
        self._hits = False  # some row had cached blocks
        self._ends = np.full(num_rows, -1, np.int32)  # tokens of rows after their latest launch
        self._counted: tuple[bytes, int] = (b"", 0)

    def note(self, launch: Launch) -> None:
        """Take in a launch's new rows, and how far all go."""
        if launch.setups:
            starts = dict(
                zip(launch.row_ids.tolist(), launch.first_positions.tolist(), strict=True)
            )
            for setup in launch.setups:
                self._leave(setup.row)
                self._paths[setup.row] = self._path(setup.tokens, starts[setup.row])
            self._counted = b"", 0
        if self._hits:
            each = launch.num_tokens if launch.repeats is None else launch.repeats.each[-1]
            self._ends[launch.row_ids] = launch.first_positions + each

    def repeated(self, rows: Int32) -> int:
        """Context tokens of these rows that a row before holds, too."""
        if not self._num_shared:
            return 0
        key = rows.tobytes()
        if key != self._counted[0]:
            paths = [self._paths.get(row, []) for row in rows.tolist()]
            twice = sum(map(len, paths)) - len(set().union(*paths))
            self._counted = key, BLOCK * twice
        return self._counted[1]

    def foreseen(self, rows: Int32, first: Int32, num_tokens: Int32, num: int, turn: int) -> int:
        """For how many of `num` steps it is known what rows share: not after the `turn`-th, when
        slices of prompts become one-token rows, if they may begin with cached blocks; and no
        further than this one if a one-token row may be new."""
        slices = num_tokens > 1
        if some(slices & (first >= BLOCK)):
            num = min(num, turn)
        if self._hits and some((self._ends[rows] != first) & ~slices):
            num = 1
        return num

    def _path(self, tokens: Int32, cached: int) -> list[int]:
        self._hits = self._hits or cached >= BLOCK
        path, key = [], 0
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key = hash((key, tokens[end - BLOCK : end].tobytes()))
            node = self._latest.get(key) if end <= cached else None
            if node is None:
                self._made += 1
                node = self._latest[key] = self._made
                self._nodes[node] = [key, 0]
            self._nodes[node][1] += 1
            self._num_shared += self._nodes[node][1] == 2
            path.append(node)
        return path

    def _leave(self, row: int) -> None:
        path: Sequence[int] = self._paths.pop(row, ())
        for node in path:
            entry = self._nodes[node]
            entry[1] -= 1
            self._num_shared -= entry[1] == 1
            if not entry[1]:
                del self._nodes[node]
                if self._latest.get(entry[0]) == node:
                    del self._latest[entry[0]]
