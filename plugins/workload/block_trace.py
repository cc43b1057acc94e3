"""Traces that name the blocks of each prompt by ids: equal ids, equal tokens."""

from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from plugins.workload.common import Ids
from plugins.workload.contents import BlockTokens
from plugins.workload.trace import Contents, Trace


class Blocks:
    """Block ids of every request of a source, and the tokens that they stand for.

    ids: of each row. block_size: tokens of a block; the last one of a prompt may be cut. What a
    prompt has beyond its blocks is its own: no other request shares it.
    """

    def __init__(self, ids: Iterable[list[int]], block_size: int) -> None:
        rows = list(ids)
        self.block_size = block_size
        self._ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        count = int(self._ends[-1]) if rows else 0
        self._ids = np.fromiter(chain.from_iterable(rows), np.int64, count)
        self._own = int(self._ids.max(initial=-1)) + 1  # from here on: ids of what has none
        self._num_ids = self._own + len(rows)

    def of(self, row: int) -> NDArray[np.int64]:
        """The ids of a row, int64."""
        return self._ids[self._ends[row - 1] if row else 0 : self._ends[row]]

    def contents(self, vocab_size: int) -> Contents:
        """Prompts as the ids say. Raises ConfigError for a vocabulary too small to tell them."""
        tokens = BlockTokens(self._num_ids, self.block_size, vocab_size)

        def contents(part: Trace) -> Callable[[int], Ids]:
            return lambda number: self._prompt(
                tokens, int(part.row[number]), int(part.prompt_tokens[number])
            )

        return contents

    def _prompt(self, tokens: BlockTokens, row: int, num_tokens: int) -> Ids:
        wanted = -(-num_tokens // self.block_size)
        ids = self.of(row)[:wanted]
        if len(ids) < wanted:
            ids = np.append(ids, np.full(wanted - len(ids), self._own + row))
        return tokens.expand(ids, num_tokens)
