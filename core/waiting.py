"""The waiting queue: kept sorted by the policy's keys, re-keyed only where something changed."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from core.errors import PolicyError
from core.queries import Hold, OrderDecision, OrderQuery
from core.request import SLOT_MASK, Request
from core.table import SequenceTable

Key = tuple[float, ...]
CachedTokens = Callable[[NDArray[np.int64]], NDArray[np.int32]]


class WaitingQueue:
    """Ids of waiting sequences. Order: policy keys, then preempted before fresh, submission."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._sorted: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}
        self._unkeyed: dict[int, None] = {}
        self._each_step: set[int] = set()
        self._expiries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._sorted) + len(self._unkeyed)

    @property
    def holds(self) -> bool:
        """The order is complete, and no key runs out on its own."""
        return not (self._unkeyed or self._each_step or self._expiries)

    def __contains__(self, id: int) -> bool:
        return id in self._keys or id in self._unkeyed

    def push(self, id: int) -> None:
        """Enter a sequence; it has no place until the next `refresh`."""
        self._unkeyed[id] = None

    def discard(self, id: int) -> None:
        """Take a sequence out, if it is in."""
        self._unkeyed.pop(id, None)
        self._each_step.discard(id)
        key = self._keys.pop(id, None)
        if key is not None:
            del self._sorted[bisect_left(self._sorted, (key, id))]

    def touch(self, id: int) -> None:
        """The sequence changed: ask for its key again."""
        if id in self._keys:
            self.discard(id)
            self.push(id)

    def at(self, index: int) -> int:
        """The id at a place; only after `refresh`."""
        return self._sorted[index][1]

    def refresh(
        self,
        decide: Callable[[OrderQuery], tuple[OrderDecision, str]],
        facts: tuple[CachedTokens, Callable[[int], Request]],
        now_s: float,
        step: int,
    ) -> None:
        """Ask for the keys that are missing or ran out, and sort them in. decide: returns the
        decision and its plugin's name. facts: the query's cached_tokens and request."""
        self._expire(now_s)
        if not self._unkeyed:
            return
        ids = np.fromiter(self._unkeyed, np.int64, len(self._unkeyed))
        view = self._table.view(ids & SLOT_MASK)
        decision, plugin = decide(OrderQuery(view, now_s, step, *facts))
        keys = _checked_keys(decision, len(ids), plugin)
        self._sort_in(ids, keys, decision.hold)

    def _sort_in(
        self, ids: NDArray[np.int64], keys: NDArray[np.float64], hold: Hold | float
    ) -> None:
        slots = ids & SLOT_MASK
        fresh = (self._table.preemptions[slots] == 0).tolist()
        arrival = self._table.arrival_order[slots].tolist()
        each = zip(keys.tolist(), fresh, arrival, ids.tolist(), strict=True)
        entries = [((*key, float(new), float(order)), one) for key, new, order, one in each]
        self._unkeyed.clear()
        self._keys.update((one, key) for key, one in entries)
        if len(entries) > 8:
            self._sorted.extend(entries)
            self._sorted.sort()
        else:
            for entry in entries:
                insort(self._sorted, entry)
        if hold is Hold.STEP:
            self._each_step.update(ids.tolist())
        elif hold is not Hold.ALWAYS:
            for one in ids.tolist():
                heapq.heappush(self._expiries, (float(hold), one))

    def _expire(self, now_s: float) -> None:
        if self._each_step and len(self._each_step) >= len(self._sorted):
            # Everything is keyed anew: drop the order at once rather than entry by entry.
            self._unkeyed = dict.fromkeys(one for _, one in self._sorted) | self._unkeyed
            self._sorted.clear()
            self._keys.clear()
        else:
            for one in sorted(self._each_step):
                self.touch(one)
        self._each_step.clear()
        while self._expiries and self._expiries[0][0] <= now_s:
            self.touch(heapq.heappop(self._expiries)[1])


def _checked_keys(decision: OrderDecision, num: int, plugin: str) -> NDArray[np.float64]:
    hold = decision.hold
    if not isinstance(hold, Hold) and not (isinstance(hold, (int, float)) and hold == hold):
        raise PolicyError(
            f"decide_order of {plugin}: hold must be a Hold or a time in seconds, got {hold!r}"
        )
    keys = np.asarray(decision.keys, np.float64)
    keys = keys[:, None] if keys.ndim == 1 else keys
    if keys.ndim != 2 or keys.shape[0] != num:
        raise PolicyError(
            f"decide_order of {plugin}: keys must be [{num}] or [{num}, k], got shape {keys.shape}"
        )
    if not np.isfinite(keys).all():
        raise PolicyError(
            f"decide_order of {plugin}: keys must be finite, got {keys[~np.isfinite(keys)][0]}"
        )
    return keys
