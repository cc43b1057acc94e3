"""The scripted tokens of a simulation's table rows (script.py)."""

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, Repeats, RowSetup
from core.recent import MOST
from plugins.executor.script import POSITION, Script, mix, stream_start

Int32 = NDArray[np.int32]
_FURTHER = np.arange(MOST).astype(np.uint64) * POSITION


class ScriptedRows:
    """What `num_rows` rows yield, of a vocabulary of that size."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._starts = np.zeros(num_rows, np.uint64)  # of the rows' token streams
        self._script = Script(vocab_size, (), {})
        self._masked: dict[int, tuple[int, frozenset[int]]] = {}  # rows: up to a position, which

    def set_up(self, setup: RowSetup) -> None:
        """A row begins anew."""
        row, params = setup.row, setup.params
        self._starts[row] = stream_start(setup.seed, setup.choice, setup.prompt_len)
        self._masked.pop(row, None)
        if params.min_tokens and params.stop_token_ids:
            ends = frozenset((*params.stop_token_ids, *setup.end_token_ids))
            self._masked[row] = setup.prompt_len + params.min_tokens, ends

    def both(self, launch: Launch, repeats: Repeats) -> tuple[Int32, Int32]:
        """What a launch that repeats yields before the last time, and then."""
        num, times, turn = launch.num_decode_rows, len(repeats.each), repeats.turn
        ends = launch.first_positions + repeats.each[-1] - np.int32(times - 1)
        streams = self._scripted(launch.row_ids, ends, times)
        if num == len(ends):
            return streams[:, :-1].ravel(), streams[:, -1]
        first = np.concatenate((streams[:num, :-1].ravel(), streams[num:, turn - 1 : -1].ravel()))
        return first, streams[launch.samples, -1]

    def tokens(self, launch: Launch) -> Int32:
        """What a launch of one step yields."""
        samples = launch.samples.nonzero()[0]
        ends = launch.first_positions + launch.num_tokens
        return self._scripted(launch.row_ids[samples], ends[samples], 1).ravel()

    def _scripted(self, rows: Int32, ends: Int32, num: int) -> Int32:
        """The tokens of rows that follow so many known ones, int32 [rows, num]."""
        mixed = self._starts.take(rows) + ends.astype(np.uint64) * POSITION
        mixed = mixed[:, None] + _FURTHER[:num]
        tokens = (mix(mixed) % np.uint64(self._vocab_size)).astype(np.int32)
        if self._masked:
            self._mask(tokens, rows, ends)
        return tokens

    def _mask(self, tokens: Int32, rows: Int32, ends: Int32) -> None:
        """Replace, in tokens [num_rows, repeats], what may not end a request yet (min_tokens)."""
        for at, row in enumerate(rows.tolist()):
            until, banned = self._masked.get(row, (0, frozenset[int]()))
            for index in range(min(until - int(ends[at]), tokens.shape[1])):
                tokens[at, index] = self._script.without(int(tokens[at, index]), banned)
