"""Requests of a run that are still to come, by time of arrival."""

import heapq
from collections.abc import Iterable

from core.request import Request


class Pending:
    """requests: in order of arrival, taken one at a time, so that a workload that builds them as
    they are asked for stays small. Among equal times they go before follow-ups, those in the order
    in which they were added."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._rest = iter(requests)
        self._next = next(self._rest, None)
        self._added: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def __bool__(self) -> bool:
        return self._next is not None or bool(self._added)

    @property
    def next_s(self) -> float:
        """When the next one arrives, seconds; infinity if there is none."""
        first = float("inf") if self._next is None else self._next.arrival_s
        return min(first, self._added[0][0]) if self._added else first

    def pop(self) -> Request:
        """The next one. Raises IndexError if there is none."""
        if self._next is not None and self._next.arrival_s <= self.next_s:
            request, self._next = self._next, next(self._rest, None)
            return request
        return heapq.heappop(self._added)[2]

    def add(self, request: Request, ended_s: float) -> None:
        """A follow-up of a request that ended then. Raises ValueError if it comes before that."""
        if request.arrival_s < ended_s:
            name, at = request.request_id, request.arrival_s
            raise ValueError(f"arrival_s of follow-up {name!r} must be >= {ended_s}, got {at}")
        heapq.heappush(self._added, (request.arrival_s, self._num_added, request))
        self._num_added += 1
