"""Scripted token streams: pure functions of seed, choice and output position, so that a test can
say what a request must get whatever the schedule was."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]
_ODD = np.array([0x9E3779B97F4A7C15, 0xD1B54A32D192ED03], np.uint64)
POSITION = np.uint64(0x8CB92BA72F3D8DD7)


class Script:
    """What the fake executor says. Without `end_at` every token of the vocabulary is equally
    likely, end tokens too; end_at: seed -> the output position at which the first end token stands;
    before it there is none."""

    def __init__(
        self, vocab_size: int, end_token_ids: tuple[int, ...], end_at: Mapping[int, int]
    ) -> None:
        self.vocab_size = vocab_size
        self._ends = np.array(sorted(end_token_ids), np.int64)
        self._seeds = np.array(sorted(end_at), np.int64)
        self._stops = np.array([end_at[seed] for seed in sorted(end_at)], np.int64)

    def tokens(
        self, seeds: NDArray[np.int64], choices: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """int32 tokens for int64 arrays of one shape."""
        mixed = (
            seeds.astype(np.uint64) * _ODD[0]
            + choices.astype(np.uint64) * _ODD[1]
            + positions.astype(np.uint64) * POSITION
        )
        tokens = (mix(mixed) % np.uint64(self.vocab_size)).astype(np.int64)
        if len(self._seeds):
            tokens = self._with_ends(tokens, seeds, positions)
        return tokens.astype(np.int32)

    def without(self, token: int, banned: frozenset[int]) -> int:
        """The first token from `token` on, cyclically, that is not banned (minimum tokens)."""
        allowed = ((token + i) % self.vocab_size for i in range(self.vocab_size))
        return next(one for one in allowed if one not in banned)

    def _with_ends(
        self, tokens: NDArray[np.int64], seeds: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        at = np.searchsorted(self._seeds, seeds).clip(max=len(self._seeds) - 1)
        scripted = self._seeds[at] == seeds
        stops = self._stops[at]
        early = scripted & (positions < stops) & np.isin(tokens, self._ends)
        banned = frozenset(self._ends.tolist())
        for index in np.flatnonzero(early).tolist():
            tokens[index] = self.without(int(tokens[index]), banned)
        return np.where(scripted & (positions == stops), self._ends[:1], tokens)


def stream_start(seed: int, choice: int, first_position: int) -> int:
    """What `mix` is given for the position 0 of a text whose output begins at first_position, less
    than 2^64: the token at a position p of the text, p - first_position of the output, is
    mix(start + p * POSITION) % vocab_size where nothing is scripted."""
    seed_part, choice_part = seed * int(_ODD[0]), choice * int(_ODD[1])
    return (seed_part + choice_part - first_position * int(POSITION)) % (1 << 64)


def mix(values: UInt64) -> UInt64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): uint64 to well spread
    uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
