"""First come, first served: by arrival. Preempted requests keep their place."""

from core.hookspecs import hookimpl
from core.queries import OrderDecision, OrderQuery


class Fcfs:
    """Key: arrival time; equal arrivals in order of submission, preempted ones first."""

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Earliest arrival first; keys never change."""
        return OrderDecision(query.waiting.arrival_s, reason="earliest arrival")
