"""What the host remembers of each device row: how its tokens are drawn. Columns over rows, in
numpy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.errors import RequestError
from core.launch import RowSetup

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
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
    tell 0 from none."""

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
        self._bias: list[tuple[Int64, Float64]] = [_NOTHING] * num_rows
        self._ends: list[Int64] = [_NOTHING[0]] * num_rows

    def set(self, setup: RowSetup) -> None:
        """Take over a row. Raises RequestError for a bias on a token outside the vocabulary."""
        row, params = setup.row, setup.params
        self.temperature[row] = max(params.temperature, 1 / LARGEST)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = np.clip(params.repetition_penalty, 1 / LARGEST, LARGEST)
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
        self.prompts[row] = setup.tokens[: setup.prompt_len] if self.asks_prompt[row] else None
        self._bias[row] = self._checked_bias(setup)
        ends = {*setup.end_token_ids, *params.stop_token_ids} if params.min_tokens else set()
        known = [token for token in sorted(ends) if token < self.vocab_size]
        self._ends[row] = np.array(known, np.int64)

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

    def _checked_bias(self, setup: RowSetup) -> tuple[Int64, Float64]:
        bias = setup.params.logit_bias
        if not bias:
            return _NOTHING
        largest = max(bias)
        if largest >= self.vocab_size:
            raise RequestError(f"logit_bias must name tokens < {self.vocab_size}, got {largest!r}")
        values = np.clip(np.array(list(bias.values()), np.float64), -LARGEST, LARGEST)
        return np.array(list(bias), np.int64), values


_NOTHING: tuple[Int64, Float64] = (np.empty(0, np.int64), np.empty(0))
