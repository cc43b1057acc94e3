"""Decode first, then slices of prompts, within a token budget (Sarathi-Serve, Agrawal et al., OSDI
2024).

Every decoding request gets its token (in order of admission, if there are more than the budget);
what is left goes to prompts in slices. Served
strictly in order, one huge prompt would hold up all behind it for as long as it takes, so a part of
the prompt budget goes to prompts with less left to compute than the oldest, shortest first. The
oldest keeps the rest: it is slowed down by at most 1 / (1 - short_share).
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import BatchDecision, BatchQuery
from core.table import some


class Chunked:
    """slice_tokens: most prompt tokens of one request in a step. token_budget: tokens of a step,
    None = the engine's limit. short_share: part of the prompt budget for prompts shorter than the
    oldest; 0 = strict order."""

    steady = True

    def __init__(
        self, slice_tokens: int = 256, token_budget: int | None = None, short_share: float = 0.5
    ) -> None:
        require(slice_tokens >= 1, "batching.slice_tokens", ">= 1", slice_tokens)
        require(
            token_budget is None or token_budget >= 1, "batching.token_budget", ">= 1", token_budget
        )
        require(0 <= short_share < 1, "batching.short_share", "in [0, 1)", short_share)
        self.slice_tokens = slice_tokens
        self.token_budget = token_budget
        self.short_share = short_share

    @hookimpl
    def decide_batch(self, query: BatchQuery) -> BatchDecision:
        """One token for each decoding request, then prompt slices."""
        running = query.running
        remaining = running.remaining
        budget = min(self.token_budget or query.token_limit, query.token_limit)
        if len(remaining) <= budget and not some(remaining > 1):
            return BatchDecision(running.id, remaining, "decode")
        decoding = (remaining == 1).nonzero()[0][:budget]
        prompts = (remaining > 1).nonzero()[0]
        slices, holds = self._share(remaining[prompts], budget - len(decoding))
        served, num_served = prompts, len(prompts)
        if not holds and some(slices < 1):
            served, slices = prompts[slices > 0], slices[slices > 0]
        rows = np.concatenate((decoding, served))
        tokens = np.concatenate((remaining[decoding], slices))
        reason = f"decode {len(decoding)}, prompts {len(served)} of {num_served}"
        return BatchDecision(running.id[rows], tokens, reason, holds)

    def _share(self, remaining: NDArray[np.int32], budget: int) -> tuple[NDArray[np.int32], bool]:
        """Tokens for each prompt, given in order of admission, and whether none wants more: then
        none will in the next steps, which have as many rows."""
        wanted = np.minimum(remaining, self.slice_tokens)
        if sum(wanted.tolist()) <= budget:
            return wanted, True
        given = np.zeros_like(wanted)
        shorter = np.flatnonzero(remaining < remaining[0])
        shorter = shorter[np.argsort(remaining[shorter], kind="stable")]
        _give(given, wanted, shorter, int(budget * self.short_share))
        _give(given, wanted, np.arange(len(wanted)), budget - int(given.sum()))
        return given, False


def _give(
    given: NDArray[np.int32], wanted: NDArray[np.int32], order: NDArray[np.int64], budget: int
) -> None:
    """Hand `budget` out along `order`, each up to what it still wants."""
    want = (wanted - given)[order]
    before = np.cumsum(want) - want
    given[order] += np.clip(budget - before, 0, want)
