"""A launch as arrays for the device: packed tokens, lengths, and which logits to compute."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch
from plugins.executor.padding import Padding
from plugins.executor.rows import SamplingRows

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Prompt tokens to score: num_tokens[i] of launch row rows[i] with num_top[i] entries each;
    targets int64 [sum] are the tokens, packed likewise."""

    rows: list[int]
    num_tokens: list[int]
    num_top: list[int]
    targets: Int64


@dataclass(frozen=True, slots=True, eq=False)
class PackedLaunch:
    """arrays, integers with T tokens in N rows: token_ids, positions, token_rows [T] (the token's
    table row), padded with token 0 at position 0 of the padding's row; row_ids, context_lens [N];
    query_starts [N + 1]; reset_rows; updates [n, 3]; feedback_at (packed index) and feedback_rows;
    logits_rows: packed indices of the sampled rows' last tokens, then of the prompt positions to
    score, then of anything. context_lens: the same on the host. num_logits: of logits_rows that
    count. scores: None if no row asks."""

    arrays: dict[str, NDArray[Any]]
    context_lens: list[int]
    query_lens: list[int]
    num_logits: int
    scores: PromptScores | None


def pack(
    launch: Launch, rows: SamplingRows, padding: Padding | None, pad_row: int, size: int = 0
) -> PackedLaunch:
    """Lay a launch out. `rows` says who wants prompt log-probabilities; its setups are applied
    already. pad_row: the padding's table row. size: tokens with padding, 0 = as padding says."""
    query_lens = launch.num_tokens.astype(np.int64)
    ends = query_lens.cumsum()
    starts = ends - query_lens
    first = launch.first_positions.astype(np.int64)
    row_ids = launch.row_ids.astype(np.int64)
    context_lens = first + query_lens
    last = ends - 1
    scores, scored_at = _prompt_scores(launch, rows, starts)
    logits_rows = np.concatenate([last[launch.samples], *scored_at])
    num_tokens, num_logits = len(launch.token_ids), len(logits_rows)
    more_tokens = more_logits = 0
    if padding is not None:
        more_tokens = (size or padding(num_tokens)) - num_tokens
        more_logits = padding(num_logits) - num_logits
    positions = np.arange(num_tokens) + (first - starts).repeat(query_lens)
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": _padded(launch.token_ids, more_tokens, 0),
        "positions": _padded(positions, more_tokens, 0),
        "token_rows": _padded(row_ids.repeat(query_lens), more_tokens, pad_row),
        "row_ids": row_ids,
        "context_lens": context_lens,
        "query_starts": np.append(starts, ends[-1]),
        **table_arrays(launch),
        "feedback_at": last[launch.feedback],
        "feedback_rows": row_ids[launch.feedback],
        "logits_rows": _padded(logits_rows, more_logits, 0),
    }
    if scores is not None:
        arrays["score_targets"] = scores.targets
    lens = context_lens.tolist(), query_lens.tolist()
    return PackedLaunch(arrays, *lens, num_logits, scores)


def _padded(array: NDArray[Any], count: int, value: int) -> NDArray[Any]:
    return np.pad(array, (0, count), constant_values=value) if count else array


def table_arrays(launch: Launch) -> dict[str, NDArray[Any]]:
    """What a launch changes in the block table, as in PackedLaunch.arrays."""
    resets = np.array([setup.row for setup in launch.setups], np.int64)
    return {"reset_rows": resets, "updates": launch.table_updates}


def _prompt_scores(
    launch: Launch, rows: SamplingRows, starts: Int64
) -> tuple[PromptScores | None, list[Int64]]:
    indices, counts, num_top, targets, scored_at = [], [], [], [], []
    for i in np.flatnonzero(rows.asks_prompt[launch.row_ids]).tolist():
        row, first = int(launch.row_ids[i]), int(launch.first_positions[i])
        prompt = rows.prompts[row]
        assert prompt is not None, f"row {row} scores its prompt and has none"
        count = min(first + int(launch.num_tokens[i]), len(prompt) - 1) - first
        if count <= 0:
            continue
        indices.append(i)
        counts.append(count)
        num_top.append(int(rows.prompt_logprobs[row]))
        targets.append(prompt[first + 1 : first + 1 + count])
        scored_at.append(np.arange(starts[i], starts[i] + count))
    if not indices:
        return None, []
    packed = np.concatenate(targets).astype(np.int64)
    return PromptScores(indices, counts, num_top, packed), scored_at
