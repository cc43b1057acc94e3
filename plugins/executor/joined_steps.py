"""Which steps of a simulation go in one launch, and what the time of each depends on.

Int32 arrays [N] of a launch's rows as of SimulatedExecutor.forecast: num_tokens a step, first
positions, tokens left of a prompt, room for more."""

from typing import Any

import numpy as np

from core.launch import Int32, reads
from core.recent import MOST
from core.table import some
from plugins.shared.launch_sizes import LaunchSizes


def steps_alike(num_tokens: Int32, left: Int32, room: Int32) -> tuple[int, int]:
    """How many steps may go in one, and with which of them prompts end."""
    slices = num_tokens > 1
    if not some(slices):
        alone = some(left > 1)  # a slice of one token
        num = 1 if alone else max(min(MOST, int(np.minimum.reduce(room))), 1)
        return num, num
    ends = -(-left // num_tokens)  # 1 of a row that decodes
    turn, num = (int(np.minimum.reduce(one)) for one in (ends[slices], ends - 1 + room))
    if some(ends[slices] > turn):
        num = min(num, turn)
    if (first_end := int(room[~slices].min(initial=MOST + 1))) <= turn:
        num = min(num, first_end - 1)
    # A last slice of one token would be a one-token row.
    if some((left == num_tokens * (turn - 1) + 1) & slices):
        num = min(num, turn - 1)
    return max(min(num, MOST), 1), turn


def of_slices(
    sizes: LaunchSizes, num_tokens: Int32, first: Int32, each: Int32, turn: int
) -> tuple[Any, dict[int, str]]:
    """What the step's time depends on, of steps with slices until the `turn`-th, and how they
    are started, from which step on."""
    kv_tokens, attended, tokens = reads(first, each)
    num_rows = len(num_tokens)
    num_decodes = int(np.count_nonzero(num_tokens == 1))
    rows, of_decodes, kind = sizes.padded(num_rows, num_rows, num_rows)
    computed, kinds = np.full(len(tokens), num_rows), {turn: kind}
    computed[turn:], tokens[turn:] = rows, of_decodes
    chunks, last = num_tokens > 1, min(turn, len(tokens)) - 1
    context = first[chunks] + each[: last + 1, chunks].astype(np.int64)
    new = np.diff(context, axis=0, prepend=first[None, chunks])
    longest, pairs = context.max(axis=1), (new * context).sum(axis=1)
    for at in range(last, -1, -1):
        more = int(longest[at]), int(pairs[at])
        padded = sizes.padded(num_decodes, num_rows, int(tokens[at]), *more)
        tokens[at], kinds[at] = padded[1], padded[2]
    for at in range(last, 0, -1):
        if kinds[at] == kinds[at - 1]:
            del kinds[at]
    return (computed, tokens, kv_tokens, attended), kinds
