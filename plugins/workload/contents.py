"""What the prompts of a trace hold, which records lengths or block ids but no text."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from core.config import require
from plugins.workload.common import Ids, stream
from plugins.workload.trace import Contents, Trace


def unshared(vocab_size: int, seed: int) -> Contents:
    """Random prompts for a trace that records lengths alone."""

    def contents(part: Trace) -> Callable[[int], Ids]:
        longest = int(part.prompt_tokens.max())
        prompts = RandomPrompts(len(part), longest, vocab_size, seed)
        return lambda number: prompts.prompt(number, int(part.prompt_tokens[number]))

    return contents


class RandomPrompts:
    """Prompts that share no prefix: number i is a view that begins at place i of one array of
    uniformly random ids, so that a million of them take the memory of one.

    Two prompts may begin with the same few tokens, as any random ones: with 1,000 ids none of
    19,366 shares four. A real model sees shifted random text.
    """

    def __init__(self, num: int, longest: int, vocab_size: int, seed: int) -> None:
        draw = stream(seed, "token_ids")
        self._ids = draw.integers(0, vocab_size, num + longest, np.int32)
        self._ids.flags.writeable = False

    def prompt(self, number: int, num_tokens: int) -> Ids:
        """int32 [num_tokens], read-only."""
        return self._ids[number : number + num_tokens]


class BlockTokens:
    """Token ids for a trace's block ids: equal ids give equal tokens, different ids differ.

    A block repeats the digits of its id in base `vocab_size`, as many as the largest id needs,
    rounded up to a power of two, `period`. So every page of a block, at any page size from
    `period` to `block_size` that is a power of two, names the block; and so does each token where
    the vocabulary is as large as the number of ids.
    """

    def __init__(self, num_ids: int, block_size: int, vocab_size: int) -> None:
        self.period = 1
        while vocab_size**self.period < num_ids:
            self.period *= 2
        fits = block_size % self.period == 0
        require(fits, "vocab_size", f"enough to tell {num_ids} blocks apart", vocab_size)
        self._block_size = block_size
        self._vocab_size = vocab_size

    def expand(self, ids: NDArray[np.int64], num_tokens: int) -> Ids:
        """int32 [num_tokens]: the blocks one after the other, the last one cut to fit."""
        digits = np.empty((len(ids), self.period), np.int32)
        for place in range(self.period - 1):
            ids, digits[:, place] = np.divmod(ids, self._vocab_size)
        digits[:, -1] = ids
        return np.repeat(digits, self._block_size // self.period, axis=0).reshape(-1)[:num_tokens]
