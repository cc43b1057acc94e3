"""Request-level batching: a batch runs until its last request has ended; nobody joins meanwhile.

The rule of FasterTransformer and Triton's dynamic batcher, the baseline of Orca (Yu et al., OSDI
2022) and of every engine since. Here it is shown at its best: a request that ends gives back its
memory and costs nothing more, while the original goes on computing padding in its place.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import (
    AdmissionDecision,
    AdmissionQuery,
    BatchDecision,
    BatchQuery,
    Verdict,
)
from core.table import RequestTable
from plugins.batching.budget import check_budget, in_turn, longest_unserved


class Static:
    """batch_size: most requests of a batch, None = as many as are admitted (engine.max_num_seqs).
    token_budget: tokens of a step, None = the engine's limit.

    A batch is who runs when nobody of the last one does. It computes its prompts, whole and in
    order of admission, then decodes together. A member that is preempted leaves it and starts again
    with a later batch, as do further choices of a request (n > 1). Where another admission policy
    is asked first and always answers, who is admitted early holds a place and is not served until
    its batch comes."""

    steady = True

    def __init__(self, batch_size: int | None = None, token_budget: int | None = None) -> None:
        require(batch_size is None or batch_size >= 1, "batching.batch_size", ">= 1", batch_size)
        self.batch_size = batch_size
        self.token_budget = check_budget(token_budget)
        self._last = -1  # the batch: who runs and was admitted no later than this (admitted_order)

    @hookimpl
    def decide_admission(self, query: AdmissionQuery) -> AdmissionDecision | None:
        """WAIT while a batch is under way or the next is full; None: memory is another's matter."""
        running = query.running
        under_way = int((running.admitted_order <= self._last).sum())
        if under_way:
            text = f"a batch is under way, {under_way} of it not done"
            return AdmissionDecision(Verdict.WAIT, text)
        if self.batch_size is not None and len(running) >= self.batch_size:
            text = f"the batch has its {self.batch_size} requests (batch_size)"
            return AdmissionDecision(Verdict.WAIT, text)
        return None

    @hookimpl
    def decide_batch(self, query: BatchQuery) -> BatchDecision:
        """Prompts of the batch if any has some left, else a token for each of its requests."""
        running = query.running
        members = self._members(running)
        budget = min(self.token_budget or query.token_limit, query.token_limit)
        remaining, computed = running.remaining[members], running.computed[members]
        prompts = members[(remaining > 1) | (computed < running.prompt[members])]
        rows = prompts if len(prompts) else longest_unserved(running, members, budget)
        tokens = in_turn(running.remaining[rows], budget)
        served = tokens > 0
        part = f"prefill {len(prompts)} of" if len(prompts) else "decode"
        reason = f"{part} {len(members)} in the batch, {len(running) - len(members)} wait for it"
        return BatchDecision(running.id[rows[served]], tokens[served], reason)

    def _members(self, running: RequestTable) -> NDArray[np.int64]:
        """Rows of the batch; whoever runs, up to batch_size, if it has ended."""
        order = running.admitted_order
        if order[0] > self._last:
            self._last = int(order[: self.batch_size][-1])
        return np.flatnonzero(order <= self._last)
