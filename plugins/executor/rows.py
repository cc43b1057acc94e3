"""What the host remembers of each device row: how its tokens are drawn. Columns over rows, in
numpy."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import RequestError
from core.launch import RowSetup

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
DRAWS = ("temperature", "top_k", "top_p", "min_p_log", "seed", "choice")
"""A row's parameters as kernels take them (plugins/executor/sampling.py)."""
FLOAT_DRAWS = ("temperature", "top_p", "min_p_log")
NEVER = np.iinfo(np.int64).max
LARGEST = 1e30
"""Bound on biases and factors: fp32 logits stay finite, and nothing that a request can mean is
lost."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenEdits:
    """Additions to single logits: value added to token in sampled row `index`; all [n]."""

    index: Int64
    token: Int64
    value: Float64


class SamplingRows:
    """Sampling state of `num_rows` device rows, overwritten by every RowSetup.

    random: the row draws (its temperature is above 0 and more than one token can survive its
    filters). penalised: it has a penalty. edited: it has biases or minimum tokens. logprobs,
    prompt_logprobs: it asked for that many top entries beside the token's own; asks and asks_prompt
    tell 0 from none. draws: DRAWS as 64-bit words [6, num_rows], floats being float64. A new row is
    greedy."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.ones(num_rows)
        self.top_p = np.ones(num_rows)
        self.min_p = np.zeros(num_rows)
        self.repetition = np.ones(num_rows)
        self.presence = np.zeros(num_rows)
        self.frequency = np.zeros(num_rows)
        self.top_k = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.int64)
        self.choice = np.zeros(num_rows, np.int64)
        self.prompt_len = np.zeros(num_rows, np.int64)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.logprobs = np.zeros(num_rows, np.int64)
        self.prompt_logprobs = np.zeros(num_rows, np.int64)
        self.random = np.zeros(num_rows, np.bool_)
        self.penalised = np.zeros(num_rows, np.bool_)
        self.edited = np.zeros(num_rows, np.bool_)
        self.asks = np.zeros(num_rows, np.bool_)
        self.asks_prompt = np.zeros(num_rows, np.bool_)
        self.prompts: list[NDArray[np.int32] | None] = [None] * num_rows
        self.draws = np.zeros((len(DRAWS), num_rows), np.int64)
        self._draws = _by_name(self.draws)
        self._draws["top_p"][:] = 1.0
        self._draws["min_p_log"][:] = -np.inf
        self._only_draws_from = np.zeros(num_rows, np.int64)
        self._bias: list[tuple[Int64, Float64]] = [_NOTHING] * num_rows
        self._ends: list[Int64] = [_NOTHING[0]] * num_rows

    def set(self, setup: RowSetup) -> None:
        """Take over a row. Raises RequestError for a bias on a token outside the vocabulary."""
        row, params = setup.row, setup.params
        self.temperature[row] = max(params.temperature, 1 / LARGEST)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = min(max(params.repetition_penalty, 1 / LARGEST), LARGEST)
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.top_k[row] = min(params.top_k, self.vocab_size)
        self.seed[row] = setup.seed
        self.choice[row] = setup.choice
        self.prompt_len[row] = setup.prompt_len
        self.min_tokens[row] = params.min_tokens
        self.logprobs[row] = min(params.logprobs or 0, self.vocab_size)
        self.prompt_logprobs[row] = min(params.prompt_logprobs or 0, self.vocab_size)
        self.asks[row] = params.logprobs is not None
        self.asks_prompt[row] = params.prompt_logprobs is not None
        self.random[row] = params.temperature > 0 and params.top_k != 1 and params.top_p > 0
        self.penalised[row] = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        self.edited[row] = bool(params.logit_bias) or params.min_tokens > 0
        self._set_draws(row)
        self._only_draws_from[row] = self._first_that_only_draws(row, bool(params.logit_bias))
        self.prompts[row] = setup.tokens[: setup.prompt_len] if self.asks_prompt[row] else None
        self._bias[row] = self._checked_bias(setup)
        ends = {*setup.end_token_ids, *params.stop_token_ids} if params.min_tokens else set()
        known = [token for token in sorted(ends) if token < self.vocab_size]
        self._ends[row] = np.array(known, np.int64)

    def draw_columns(self, row_ids: Int64) -> dict[str, NDArray[Any]]:
        """DRAWS of rows: int64 or float64 [k] each."""
        return _by_name(self.draws[:, row_ids])

    def only_draw(self, row_ids: NDArray[Any], positions: NDArray[Any]) -> bool:
        """Whether rows with one token each, at these positions of their sequences, ask for nothing
        but a draw: no penalties, biases, masks or log-probabilities."""
        return bool((positions >= self._only_draws_from[row_ids]).all())

    def edits(self, row_ids: Int64, output_positions: Int64) -> TokenEdits:
        """Biases and masks for sampled rows: row_ids [k], the output position each draws for
        [k]."""
        index: list[Int64] = [_NOTHING[0]]
        token: list[Int64] = [_NOTHING[0]]
        value: list[Float64] = [_NOTHING[1]]
        for i in np.flatnonzero(self.edited[row_ids]).tolist():
            row = int(row_ids[i])
            biased, biases = self._bias[row]
            ends = self._ends[row] if output_positions[i] < self.min_tokens[row] else _NOTHING[0]
            index.append(np.full(len(biased) + len(ends), i))
            token += [biased, ends]
            value += [biases, np.full(len(ends), -np.inf)]
        return TokenEdits(np.concatenate(index), np.concatenate(token), np.concatenate(value))

    def _set_draws(self, row: int) -> None:
        draws, min_p = self._draws, float(self.min_p[row])
        draws["temperature"][row] = self.temperature[row] if self.random[row] else 0.0
        draws["top_k"][row] = self.top_k[row]
        draws["top_p"][row] = self.top_p[row]
        draws["min_p_log"][row] = math.log(min_p) if min_p else -math.inf
        draws["seed"][row] = self.seed[row]
        draws["choice"][row] = self.choice[row]

    def _first_that_only_draws(self, row: int, biased: bool) -> int:
        if self.penalised[row] or self.asks[row] or biased:
            return NEVER
        # The token at position p is fed to draw output p + 1 - prompt_len.
        last = int(self.prompt_len[row]) - 1
        if self.min_tokens[row]:
            return last + int(self.min_tokens[row])
        return last if self.asks_prompt[row] else 0

    def _checked_bias(self, setup: RowSetup) -> tuple[Int64, Float64]:
        bias = setup.params.logit_bias
        if not bias:
            return _NOTHING
        largest = max(bias)
        if largest >= self.vocab_size:
            raise RequestError(f"logit_bias must name tokens < {self.vocab_size}, got {largest!r}")
        values = np.clip(np.array(list(bias.values()), np.float64), -LARGEST, LARGEST)
        return np.array(list(bias), np.int64), values


def _by_name(words: Int64) -> dict[str, NDArray[Any]]:
    """Rows of `words` [6, k] as DRAWS."""
    return {
        name: column.view(np.float64) if name in FLOAT_DRAWS else column
        for name, column in zip(DRAWS, words, strict=True)
    }


_NOTHING: tuple[Int64, Float64] = (np.empty(0, np.int64), np.empty(0))
