"""The contract between the core and an executor: what to compute, and what came of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.request import SamplingParams

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Sizes the executor allocates for, fixed for a run.

    num_pages counts page 0, which is reserved: padding rows and table tails point at it.
    num_rows: device table rows; ids 0 <= row < num_rows. max_pages: entries of a table row."""

    num_pages: int
    page_size: int
    num_rows: int
    max_pages: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RowSetup:
    """A row (re)assigned by this launch: point its table row at page 0, reset its sampling state.

    tokens: all known ids at that time, prompt first, int32 [known] (known > prompt_len after a
    preemption). seed and choice key the random draws with the output position. end_token_ids stop
    the sequence and are masked until params.min_tokens tokens are out."""

    row: int
    params: SamplingParams
    prompt_len: int
    tokens: Int32
    seed: int
    choice: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """How often a launch runs, and when: what an executor's `forecast` told.

    each int32 [times, num_rows]: tokens that a row has computed after each time; done int64
    [times]: all rows; ends_s, lasts_s float64 [times]: when that is, and how long after the end
    before, or the plan. One-token rows sample each time; the others, whose prompts end together,
    from the `turn`-th on (1 <= turn <= times; times: in the last, or not yet)."""

    each: Int32
    done: Int64
    ends_s: Floats
    lasts_s: Floats
    turn: int

    def until(self, times: int) -> "Repeats":
        """The first so many times."""
        each, done, turn = self.each[:times], self.done[:times], min(self.turn, times)
        return Repeats(each, done, self.ends_s[:times], self.lasts_s[:times], turn)

    def mean(self, levels: NDArray[Any]) -> float:
        """Of a level at each time, over their time."""
        return float(np.dot(levels, self.lasts_s) / sum(self.lasts_s.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One step's device work. Launches run in order on one stream; rows with one token come first.

    row_ids, first_positions, num_tokens: int32 [num_rows]. Row i computes KV for positions
    first_positions[i] .. first_positions[i] + num_tokens[i] - 1 and may read all earlier ones.
    token_ids: int32 [sum(num_tokens)], packed row by row; 0 where `feedback` applies. feedback:
    bool [num_rows]: the row's last input token is the one its latest sample left on the device.
    samples: bool [num_rows]: the row ends at its last known token and yields one new token, drawn
    for output position first_position + num_tokens - prompt_len. num_decode_rows: rows [0,
    num_decode_rows) have one token each. table_updates: int32 [num_updates, 3] of (row, page index,
    page id), applied after `setups`, before use. repeats: only for an executor with a `forecast`:
    it runs several times, and has two results: of all times but the last, and of the last. num_new:
    sequences that its plan admitted, whether they have tokens in it or not."""

    launch_id: int
    row_ids: Int32
    first_positions: Int32
    num_tokens: Int32
    token_ids: Int32
    feedback: NDArray[np.bool_]
    samples: NDArray[np.bool_]
    num_decode_rows: int
    table_updates: Int32
    setups: tuple[RowSetup, ...]
    repeats: Repeats | None = None
    num_new: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of a position: after penalties and bias, before temperature and truncation.

    top_ids int32 [k], top_logprobs float32 [k], best first. Never NaN; a masked entry is -inf."""

    logprob: float
    top_ids: Int32
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LaunchResult:
    """What a launch yielded. tokens int32 [samples.sum()], in row order; the first result of one
    that repeats has those of each row one after the other: times - 1 of one-token rows, times -
    turn of the others.

    errors: row index in the launch -> why its logits hold no token; its request fails, and nothing
    else of that row counts. logprobs: index into tokens -> entry, for rows that asked.
    prompt_logprobs: row index in the launch -> entries for prompt positions first + 1 .. min(first
    + num_tokens, prompt_len - 1), in order, where first = first_positions[row]: the logits of
    position p score the token at p + 1. finished_s: engine-clock time the device was done.
    graph_tokens: tokens, padding included, of the captured graph that ran it; 0 = none did.
    attention: what its kernels planned, if the executor records that."""

    launch_id: int
    tokens: Int32
    finished_s: float
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    graph_tokens: int = 0
    attention: dict[str, Any] = field(default_factory=dict)
