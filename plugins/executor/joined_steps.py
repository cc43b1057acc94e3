"""Which steps of a simulation go in one launch, and what the time of each depends on.

Int32 arrays [N] of a launch's rows as of SimulatedExecutor.forecast: num_tokens a step, first
positions, tokens left of a prompt, room for more."""

from typing import Any

import numpy as np

from core.launch import Int32, Int64
from core.recent import MOST
from plugins.shared.launch_sizes import LaunchSizes


def steps_alike(num_tokens: Int32, left: Int32, room: Int32) -> tuple[int, int]:
    """How many steps may go in one, and with which of them prompts end."""
    rows = list(zip(num_tokens.tolist(), left.tolist(), room.tolist(), strict=True))
    slices = [row for row in rows if row[0] > 1]
    first_end = min([more for num, _, more in rows if num == 1], default=MOST + 1)
    if not slices:
        alone = any(remaining > 1 for _, remaining, _ in rows)  # a slice of one token
        num = 1 if alone else max(min(MOST, first_end), 1)
        return num, num
    ends = [-(-remaining // num) for num, remaining, _ in slices]
    turn = min(ends)
    num = min(end - 1 + more for end, (_, _, more) in zip(ends, slices, strict=True))
    num = min(num, first_end)  # who ends does so in the last
    if max(ends) > turn:
        num = min(num, turn)
    # A last slice of one token would be a one-token row.
    if any(remaining == one * (turn - 1) + 1 for one, remaining, _ in slices):
        num = min(num, turn - 1)
    return max(min(num, MOST), 1), turn


def of_slices(
    sizes: LaunchSizes, num_tokens: Int32, first: Int32, each: Int32, turn: int
) -> tuple[Any, dict[int, str]]:
    """What the step's time depends on, of steps with slices until the `turn`-th, and how they
    are started, from which step on. each: as of `reads`."""
    kv_tokens, attended, tokens = reads(first, each)
    num_rows, last = len(num_tokens), min(turn, len(tokens))
    num_decodes = int(np.count_nonzero(num_tokens == 1))
    rows, of_decodes, kind = sizes.padded(num_rows, num_rows, num_rows)
    computed, kinds = np.full(len(tokens), num_rows), {turn: kind}
    computed[turn:], tokens[turn:] = rows, of_decodes
    longest = pairs = [0] * last
    if sizes.mixed:
        chunks = num_tokens > 1
        context = first[chunks] + each[: last + 1, chunks].astype(np.int64)
        new, context = context[1:] - context[:-1], context[1:]
        longest, pairs = context.max(axis=1).tolist(), (new * context).sum(axis=1).tolist()
    before = ""
    for at, *facts in zip(range(last), tokens[:last].tolist(), longest, pairs, strict=True):
        _, tokens[at], kind = sizes.padded(num_decodes, num_rows, *facts)
        if kind != before:
            kinds[at] = before = kind
    return (computed, tokens, kv_tokens, attended), kinds


def reads(first: Int32, each: Int32) -> tuple[Int64, Int64, Int64]:
    """kv_tokens, attended (see StepRecord) and tokens, int64 [times], of rows that start at `first`
    and have computed so many tokens after each time; each: int32 [1 + times, rows], zeros first."""
    ends = first.astype(np.int64) + each
    kv_tokens = np.add.reduce(ends, axis=1)
    # A token attends to as many as its place: up to a place n to n (n + 1) / 2.
    attended = np.add.reduce(ends * ends, axis=1) + kv_tokens
    attended = (attended[1:] - attended[:-1]) // 2
    return kv_tokens[1:], attended, kv_tokens[1:] - kv_tokens[:-1]
