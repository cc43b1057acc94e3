"""Decode first, then as long a slice of prompts as a target for the gap between tokens allows.

Sarathi-Serve (Agrawal et al., OSDI 2024) fixes the token budget of a step so that a step stays
within the target; a long context then still exceeds it and a short one wastes it. Here the budget
of each step follows from the engine's model of step times, as Niyama's dynamic chunks do (Goel et
al., arXiv 2503.22562).
"""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import BatchDecision, BatchQuery
from core.table import RequestTable
from plugins.batching.budget import check_budget, in_turn, longest_unserved
from plugins.shared.step_time import StepTimeModel


class SloChunked:
    """itl_slo_ms: the step's time that must not be exceeded while streams run. min_tokens: prompt
    tokens that a step takes whatever it costs (all that is left, if less), so that prompts move on.
    token_budget: tokens of a step, None = the engine's limit; without a stream to hold up, prompts
    fill it.

    Prompts are served in order of admission. Should more streams run than the budget has room for
    beside min_tokens (at most half of it), they take turns."""

    steady = True

    def __init__(
        self, itl_slo_ms: float = 30.0, min_tokens: int = 16, token_budget: int | None = None
    ) -> None:
        require(itl_slo_ms > 0, "batching.itl_slo_ms", "> 0", itl_slo_ms)
        require(min_tokens >= 1, "batching.min_tokens", ">= 1", min_tokens)
        self.itl_slo_ms = itl_slo_ms
        self.min_tokens = min_tokens
        self.token_budget = check_budget(token_budget)

    @hookimpl
    def decide_batch(self, query: BatchQuery) -> BatchDecision:
        """A token for each stream, and the longest slice that the model of step times allows."""
        running = query.running
        remaining = running.remaining
        budget = min(self.token_budget or query.token_limit, query.token_limit)
        prompts = np.flatnonzero(remaining > 1)
        wanted = int(remaining[prompts].sum())
        decodes = np.flatnonzero(remaining == 1)
        room = budget - min(self.min_tokens, wanted, budget // 2)
        if budget == 1 and len(decodes) and wanted:  # by turns
            room = int(running.last_step[prompts].max() > running.last_step[decodes].max())
        decodes = longest_unserved(running, decodes, room)
        load = _Load(running, prompts, decodes)
        tokens = most = min(budget - len(decodes), wanted)
        if wanted and len(decodes):
            tokens = self._longest_slice(query, load, most)
        slices = in_turn(remaining[prompts], tokens)
        served = slices > 0
        rows = np.concatenate([decodes, prompts[served]])
        counts = np.concatenate([np.ones(len(decodes), np.int32), slices[served]])
        reason = f"decode {len(decodes)}, {tokens} tokens of {int(served.sum())} prompts"
        return BatchDecision(running.id[rows], counts, reason)

    def _longest_slice(self, query: BatchQuery, load: "_Load", most: int) -> int:
        """By bisection: a step takes no less time for a longer slice."""
        target_s = self.itl_slo_ms / 1e3
        least = min(self.min_tokens, most)
        while least < most:
            middle = (least + most + 1) // 2
            if load.seconds(query.step_time, middle) <= target_s:
                least = middle
            else:
                most = middle - 1
        return least


class _Load:
    """What a step computes: a token for each decode row, and a slice of the prompts in turn."""

    def __init__(
        self, running: RequestTable, prompts: NDArray[np.int64], decodes: NDArray[np.int64]
    ) -> None:
        left = running.remaining[prompts].astype(np.int64)
        computed = running.computed[prompts].astype(np.int64)
        self._num_decodes = len(decodes)
        self._context = int(running.computed[decodes].sum(dtype=np.int64)) + len(decodes)
        # Of the first k prompts in whole: tokens, context read, pairs; computed of the next.
        self._tokens = [0, *np.cumsum(left).tolist()]
        self._read = [0, *np.cumsum(computed + left).tolist()]
        self._pairs = [0, *np.cumsum(left * computed + left * (left + 1) // 2).tolist()]
        self._computed = computed.tolist()

    def seconds(self, model: StepTimeModel, tokens: int) -> float:
        """The step's time with a slice of so many tokens, >= 1."""
        whole = bisect_left(self._tokens, tokens) - 1
        part, computed = tokens - self._tokens[whole], self._computed[whole]
        read = self._context + self._read[whole] + computed + part
        pairs = self._pairs[whole] + part * computed + part * (part + 1) // 2
        rows = self._num_decodes + whole + 1
        return float(model.seconds(rows, self._num_decodes + tokens, read, self._context + pairs))
