"""Prefill first: prompts in FIFO order; decode steps run only while no admitted request waits for
prefill.

The rule of early continuous batching (vLLM 0.x, SGLang's default). Quick first tokens, but running
streams stall while prompts keep arriving; `chunked` bounds that gap to one step.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import BatchDecision, BatchQuery


class PrefillFirst:
    """token_budget: tokens of a step, None = the engine's limit. Longer prompts are cut."""

    steady = True
    starves = "streams stand still while prompts keep coming"

    def __init__(self, token_budget: int | None = None) -> None:
        require(
            token_budget is None or token_budget >= 1, "batching.token_budget", ">= 1", token_budget
        )
        self.token_budget = token_budget

    @hookimpl
    def decide_batch(self, query: BatchQuery) -> BatchDecision:
        """Only prompts if any admitted request has more than its next token to compute, else only
        decodes."""
        running = query.running
        remaining = running.remaining
        budget = min(self.token_budget or query.token_limit, query.token_limit)
        rows = np.flatnonzero((remaining > 1) | (running.computed < running.prompt))
        reason = f"prefill {len(rows)}"
        if len(rows) == 0:
            rows, reason = np.arange(len(running)), f"decode {len(running)}"
        before = np.cumsum(remaining[rows]) - remaining[rows]
        tokens = np.clip(budget - before, 0, remaining[rows])
        served = tokens > 0
        return BatchDecision(running.id[rows[served]], tokens[served], reason)
