"""What a router knows of its replicas: who they are, how they stand, and what they were sent.

Pure bookkeeping with the time given: nothing here waits, asks a replica or opens a connection, so
that a replica which answers nothing holds up nobody. Every method may be called from any thread.

A replica's figures are those of its newest report, corrected by the tickets that it had not yet
received then. A ticket counts until it is closed, whatever became of the request (ended, aborted,
refused, failed over), and counts only in the incarnation of the replica that it was written for.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from plugins.shared.routing import (
    COLUMNS,
    ReplicaSnapshot,
    ReplicaState,
    ReplicaTable,
    Ticket,
)


@dataclass(slots=True, eq=False)
class Incarnation:
    """A replica from its joining to its death. sent: tickets written; open: those not closed, by
    number. heard_s: its last sign of life. row: in the registry's columns."""

    replica: str
    number: int
    row: int
    heard_s: float
    reported_s: float = 0.0
    snapshot: ReplicaSnapshot | None = None
    draining: bool = False
    dead: bool = False
    why: str = ""
    sent: int = 0
    open: dict[int, Ticket] = field(default_factory=dict)


class Registry:
    """Replicas by name, in the order in which they joined.

    suspect_after_s, dead_after_s: seconds without a report or a heartbeat after which a replica
    gets no more requests, and is given up."""

    def __init__(self, suspect_after_s: float = 3.0, dead_after_s: float = 10.0) -> None:
        require(suspect_after_s > 0, "router.suspect_after_s", "> 0", suspect_after_s)
        rule = f">= suspect_after_s = {suspect_after_s}"
        require(dead_after_s >= suspect_after_s, "router.dead_after_s", rule, dead_after_s)
        self.suspect_after_s = suspect_after_s
        self.dead_after_s = dead_after_s
        self.lock = RLock()
        self._replicas: dict[str, Incarnation] = {}
        self._incarnations: dict[int, Incarnation] = {}  # those alive or with open tickets
        self._joined = 0
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()
        }
        self._free_rows: list[int] = []

    def join(self, replica: str, now_s: float) -> int:
        """A replica is there, though not ready before its first report; returns the number of its
        incarnation. An earlier one of that name is dead from now on."""
        with self.lock:
            if replica in self._replicas:
                self._bury(self._replicas.pop(replica), "it joined again")
            self._joined += 1
            one = Incarnation(replica, self._joined, self._take_row(), now_s)
            self._replicas[replica] = self._incarnations[one.number] = one
            return one.number

    def report(self, incarnation: int, snapshot: ReplicaSnapshot, now_s: float) -> bool:
        """Take in a snapshot; whether it was news: not of an incarnation that is gone, and not
        older than what is known."""
        with self.lock:
            one = self._living(incarnation)
            if one is None:
                return False
            one.heard_s = max(one.heard_s, now_s)
            if one.snapshot is not None and snapshot.number <= one.snapshot.number:
                return False
            one.snapshot, one.reported_s = snapshot, now_s
            self._write(one)
            return True

    def heartbeat(self, incarnation: int, now_s: float) -> bool:
        """A sign of life without figures; whether the incarnation is known and alive."""
        with self.lock:
            one = self._living(incarnation)
            if one is not None:
                one.heard_s = max(one.heard_s, now_s)
            return one is not None

    def drain(self, replica: str, draining: bool = True) -> bool:
        """Send it nothing more (or again); whether it is known and alive."""
        with self.lock:
            one = self._replicas.get(replica)
            if one is None or one.dead:
                return False
            one.draining = draining
            return True

    def fail(self, incarnation: int, why: str) -> list[Ticket]:
        """An incarnation is known to be gone; returns what it leaves undone. Those tickets stay
        open until they are closed."""
        with self.lock:
            one = self._living(incarnation)
            if one is None:
                return []
            self._bury(one, why)
            return list(one.open.values())

    def expire(self, now_s: float) -> list[Ticket]:
        """Give up who has been silent for too long; returns what they leave undone."""
        with self.lock:
            silent = [
                one
                for one in self._replicas.values()
                if not one.dead and now_s - one.heard_s > self.dead_after_s
            ]
            why = f"no sign of life in {self.dead_after_s:g} s"
            return [ticket for one in silent for ticket in self.fail(one.number, why)]

    def forget(self, replica: str) -> None:
        """Take a replica off the list."""
        with self.lock:
            one = self._replicas.pop(replica, None)
            if one is not None and not one.dead:
                self._bury(one, "it was taken off the list")

    def state(self, replica: str, now_s: float) -> ReplicaState:
        """How a replica stands now. Raises KeyError for an unknown one."""
        with self.lock:
            return self._state(self._replicas[replica], now_s)

    def listed(self, now_s: float) -> list[tuple[Incarnation, ReplicaState]]:
        """Every replica, the dead included until they join again or are forgotten."""
        with self.lock:
            return [(one, self._state(one, now_s)) for one in self._replicas.values()]

    def table(self, now_s: float, excluded: Collection[str] = ()) -> ReplicaTable:
        """The replicas that are ready, `excluded` left out."""
        with self.lock:
            ready = [
                one
                for one in self._replicas.values()
                if self._state(one, now_s) is ReplicaState.ready and one.replica not in excluded
            ]
            rows = np.array([one.row for one in ready], np.int64)
            columns = {name: column[rows] for name, column in self._columns.items()}
            columns["age_s"] = now_s - columns["age_s"]
            return ReplicaTable(tuple([one.replica for one in ready]), columns)

    def write(
        self,
        replica: str,
        request_id: str,
        now_s: float,
        pages: int,
        prompt_tokens: int,
        cached_tokens: int,
    ) -> Ticket:
        """Count a request that goes to a replica. Raises KeyError for an unknown or dead one."""
        with self.lock:
            one = self._replicas[replica]
            if one.dead:
                raise KeyError(replica)
            one.sent += 1
            sizes = pages, prompt_tokens, cached_tokens
            ticket = Ticket(one.sent, request_id, replica, one.number, now_s, *sizes)
            one.open[ticket.number] = ticket
            self._add(one, ticket, 1)
            return ticket

    def close(self, ticket: Ticket) -> bool:
        """Count it no longer; whether it was open. Closing twice changes nothing."""
        with self.lock:
            one = self._incarnations.get(ticket.incarnation)
            if one is None or one.open.pop(ticket.number, None) is None:
                return False
            if not one.dead:
                self._add(one, ticket, -1)
            elif not one.open:
                del self._incarnations[one.number]
            return True

    def num_open(self, replica: str) -> int:
        """Tickets of a replica's present incarnation that are not closed."""
        with self.lock:
            return len(self._replicas[replica].open)

    def _state(self, one: Incarnation, now_s: float) -> ReplicaState:
        silent_s = now_s - one.heard_s
        if one.dead:
            return ReplicaState.dead
        if silent_s > self.suspect_after_s:
            return ReplicaState.suspect
        if one.draining:
            return ReplicaState.draining
        return ReplicaState.joining if one.snapshot is None else ReplicaState.ready

    def _living(self, incarnation: int) -> Incarnation | None:
        one = self._incarnations.get(incarnation)
        return None if one is None or one.dead else one

    def _bury(self, one: Incarnation, why: str) -> None:
        if not one.dead:
            one.dead, one.why = True, why
            self._free_rows.append(one.row)
        if not one.open:
            self._incarnations.pop(one.number, None)

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        row = len(self._columns["requests"])
        for name, column in self._columns.items():
            self._columns[name] = np.append(column, np.zeros(1, column.dtype))
        return row

    def _write(self, one: Incarnation) -> None:
        """The row of an incarnation, from its snapshot and the tickets that came after it."""
        snapshot = one.snapshot
        assert snapshot is not None, "a row is written when a report is in"
        since = [ticket for ticket in one.open.values() if ticket.number > snapshot.received]
        device, nan = snapshot.device, float("nan")
        used, whole = device.memory_used_bytes, device.memory_bytes
        values: dict[str, float | None] = {
            "requests": len(one.open) + snapshot.foreign,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "page_size": snapshot.page_size,
            "pool_pages": snapshot.pool_pages,
            "pages_free": snapshot.pages_free,
            "pages_evictable": snapshot.pages_evictable,
            "pages_promised": snapshot.pages_promised,
            "prompt_tokens": snapshot.prompt_tokens,
            "kv_tokens": snapshot.kv_tokens,
            "step_s": snapshot.step_s,
            "temperature_c": device.temperature_c,
            "memory_share": None if used is None or not whole else used / whole,
            "utilisation": device.utilisation,
            "age_s": one.reported_s,
        }
        for name, value in values.items():
            self._columns[name][one.row] = nan if value is None else value
        for ticket in since:
            self._add_figures(one.row, ticket, 1)

    def _add(self, one: Incarnation, ticket: Ticket, sign: int) -> None:
        self._columns["requests"][one.row] += sign
        if one.snapshot is not None and ticket.number > one.snapshot.received:
            self._add_figures(one.row, ticket, sign)

    def _add_figures(self, row: int, ticket: Ticket, sign: int) -> None:
        self._columns["pages_promised"][row] += sign * ticket.pages
        self._columns["prompt_tokens"][row] += sign * ticket.prompt_tokens
        self._columns["kv_tokens"][row] += sign * (ticket.prompt_tokens + ticket.cached_tokens)
