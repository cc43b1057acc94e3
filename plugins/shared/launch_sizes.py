"""How an executor pads launches and in which way it starts them: what models of their time need."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.launch import Launch

KINDS = ("decode", "graphed", "chunk", "mixed", "eager")
"""Ways to start a launch: one-token rows alone; any rows as one graph; else longer rows alone, or
both; with kernels one by one where the others have graphs."""

GRAPHED_CHUNKS = 31
"""Longer rows that a graph of any rows (plugins/executor/mixed_graphs.py) has room for."""

GRAPHED_CONTEXT = 8192
"""Tokens of a longer row in it, at most: its kernel does not divide a tile's keys."""

GRAPHED_WORK = 10e9
"""Operations of a layer's attention over longer rows in it, at most: from here on kernels for long
chunks, which a graph cannot hold, save more than the host takes."""


@dataclass(frozen=True, slots=True)
class LaunchSizes:
    """Ascending, () = none. graphs: numbers of rows for which launches of one-token rows have
    graphs. tokens: to which the tokens of other launches are padded. chunks: those of them with
    graphs of what lies between two attentions. mixed: those with graphs of whole launches.
    mixed_pairs: that such a graph is worth, see `padded`; 0 = any number."""

    graphs: Sequence[int] = ()
    tokens: Sequence[int] = ()
    chunks: Sequence[int] = ()
    mixed: Sequence[int] = ()
    mixed_pairs: int = 0

    def of(self, launch: Launch) -> tuple[int, int, str]:
        """Rows and tokens that a launch computes, padding included, and its kind."""
        num_tokens, ones = sum(launch.num_tokens.tolist()), launch.num_decode_rows
        num_rows = len(launch.row_ids)
        if ones == num_rows or not self.mixed:
            return self.padded(ones, num_rows, num_tokens)
        new = launch.num_tokens[ones:].astype(np.int64)
        context = launch.first_positions[ones:] + new
        return self.padded(ones, num_rows, num_tokens, int(context.max()), int(new @ context))

    def padded(
        self, num_decodes: int, num_rows: int, num_tokens: int, longest: int = 0, pairs: int = 0
    ) -> tuple[int, int, str]:
        """Rows and tokens that are computed, and the kind, of a launch with so many one-token rows
        among its rows. Of its longer rows: longest, tokens with context of the longest; pairs, new
        tokens times tokens with context, summed."""
        if num_decodes == num_rows:
            size = least(self.graphs, num_rows)
            if size or not self.graphs:
                return size or num_rows, size or num_rows, "decode"
            return num_rows, num_rows, "eager"
        size = least(self.mixed, num_tokens)
        fits = longest <= GRAPHED_CONTEXT and pairs <= (self.mixed_pairs or pairs)
        if size and fits and num_rows - num_decodes <= GRAPHED_CHUNKS:
            return num_rows, size, "graphed"
        tokens = least(self.tokens, num_tokens) or num_tokens
        if self.chunks and tokens not in self.chunks:
            return num_rows, tokens, "eager"
        return num_rows, tokens, "mixed" if num_decodes else "chunk"


def least(sizes: Sequence[int], count: int) -> int:
    """The least of ascending sizes that holds `count`; 0 if none does."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else 0
