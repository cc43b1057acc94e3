"""Budgets that several batching policies share."""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.table import RequestTable


def check_budget(token_budget: int | None) -> int | None:
    """`token_budget` if it is one. Raises ConfigError."""
    holds = token_budget is None or token_budget >= 1
    require(holds, "batching.token_budget", ">= 1", token_budget)
    return token_budget


def longest_unserved(
    running: RequestTable, rows: NDArray[np.int64], most: int
) -> NDArray[np.int64]:
    """At most `most` of `rows`: those served longest ago first, so that each has its turn; all of
    them, in order, if they are no more."""
    if len(rows) <= most:
        return rows
    return rows[np.argsort(running.last_step[rows], kind="stable")[:most]]


def in_turn(remaining: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """Tokens for each request of a list, from the front: all that it has left while the budget
    lasts, the last of them what is left of it."""
    before = np.cumsum(remaining, dtype=np.int64) - remaining
    tokens: NDArray[np.int32] = np.clip(budget - before, 0, remaining).astype(np.int32)
    return tokens
