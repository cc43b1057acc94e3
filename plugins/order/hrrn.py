"""Highest response ratio next: waiting over work (Brinch Hansen, 1971), in prefill tokens as in
sglang's `hrrn`.

ratio = prompt tokens that the engine computed while the request waited / tokens of its own that it
must compute before its next sample, cached ones not counted; highest first. Short and well cached
requests go first, but whoever comes starts at 0, while the ratio of a long one that waits goes on
growing. Measured in tokens, it needs no guess of a speed and stands still while no prompt is
computed.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Hold, OrderDecision, OrderQuery, StepEvent
from plugins.order.lagged import Lagged
from plugins.order.prefixes import by_arrival, cached_tokens


class Hrrn:
    """window: how many of the oldest are matched with the cache in a step; later ones count as
    if they had no match. A preempted request's wait begins anew."""

    steady = True

    def __init__(self, window: int = 128) -> None:
        require(window >= 1, "window", ">= 1", window)
        self.window = window
        self._steps: Lagged[int] = Lagged()
        self._computed = 0  # prompt tokens, up to two steps ago
        self._since: dict[int, int] = {}  # id -> `_computed` when it began to wait

    @hookimpl
    def on_step(self, query: StepEvent) -> None:
        """Count the prompt tokens of a step. Of steps that went in one, all but the last are due
        when the next is planned."""
        record, before = query.record, query.record.steps - 1
        tokens, last = record.prefill_tokens, record.step + before
        if before:
            self._steps.add(last - 1, tokens - record.last_prefill_tokens)
            tokens = record.last_prefill_tokens
        self._steps.add(last, tokens)
        self._computed += sum(self._steps.due(last + 1))

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Highest ratio first, then by arrival; for this step alone."""
        self._computed += sum(self._steps.due(query.step))
        waiting, now = query.waiting, self._computed
        ids = waiting.id.tolist()
        self._since = {one: self._since.get(one, now) for one in ids}
        since = np.fromiter(self._since.values(), np.int64, len(ids))
        work = waiting.remaining - cached_tokens(query, by_arrival(query)[: self.window])
        keys = np.stack([-(now - since) / work, waiting.arrival_s], axis=1)
        return OrderDecision(keys, Hold.STEP, "highest waiting for its work")
