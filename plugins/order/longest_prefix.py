"""Longest prefix match first, with in-batch deferral (SGLang, Zheng et al., NeurIPS 2024,
arXiv:2312.07104; sglang `SchedulePolicy`, LPM).

Requests whose prefix the cache holds go first, before it is evicted. Of several that begin alike
and find nothing cached, only the first keeps its place: the others go last in this step, so that
they may find what it computes. They still start if there is room; `defer_twins`, an admission rule,
makes them wait. With more than `max_waiting` in the queue it is first come, first served, since
matching them all in each step costs too much. Nothing bounds the wait of a request without a match.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Hold, OrderDecision, OrderQuery
from plugins.order.prefixes import beginning, by_arrival, cached_tokens


class LongestPrefix:
    """twin_tokens: a request with at most so many cached tokens that shares at least so many with
    an earlier one is put last. max_waiting: longest queue that is matched."""

    starves = "who has no match waits for who has one"

    def __init__(self, twin_tokens: int = 32, max_waiting: int = 128) -> None:
        require(twin_tokens >= 1, "twin_tokens", ">= 1", twin_tokens)
        require(max_waiting >= 1, "max_waiting", ">= 1", max_waiting)
        self.twin_tokens = twin_tokens
        self.max_waiting = max_waiting

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Twins last, most cached tokens first, then by arrival; for this step alone."""
        waiting = query.waiting
        if len(waiting) > self.max_waiting:
            level = np.zeros_like(waiting.arrival_s)
            keys = np.stack([level, level, waiting.arrival_s], axis=1)
            return OrderDecision(keys, Hold.STEP, f"over {self.max_waiting} wait: by arrival")
        rows = by_arrival(query)
        cached = cached_tokens(query, rows)
        twins = self._twins(query, rows, cached)
        keys = np.stack([twins, np.where(twins, 0, -cached), waiting.arrival_s], axis=1)
        return OrderDecision(keys, Hold.STEP, "longest cached prefix")

    def _twins(
        self, query: OrderQuery, rows: NDArray[np.int64], cached: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Who begins like an earlier one that finds as little in the cache."""
        twins = np.zeros(len(rows), np.bool_)
        seen: set[tuple[str, bytes]] = set()
        for row in rows[cached[rows] <= self.twin_tokens].tolist():
            begins = beginning(query.request(int(query.waiting.id[row])), self.twin_tokens)
            if begins is not None:
                twins[row] = begins in seen
                seen.add(begins)
        return twins
