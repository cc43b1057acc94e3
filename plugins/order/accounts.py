"""What each client was served, as a fair order may count it: the same with and without overlap.

A request is charged for its prompt when it first starts, and for each output token; what is
computed again after a preemption is the engine's loss, not the client's service. Charges come from
step records two steps old (see lagged.py); a request that left the queue in the last step is
presumed to have started, so that one client's requests do not all start on the same old account.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.queries import OrderQuery, StepEvent
from plugins.order.lagged import Lagged

STARTED = ("admitted", "resumed")  # resumed: also one preempted within the step that admitted it


@dataclass(slots=True, eq=False)
class Tab:
    """One request's account. waiting: its sequences in the queue."""

    client: str
    prompt: int
    started: bool = False
    waiting: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class Charges:
    """Tabs whose prompt is charged, with its cached tokens; and those with so many `tokens` of
    output, once for each stream."""

    prompts: list[tuple[Tab, int]]
    outputs: list[Tab]
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The queue at one plan, arrays of its length. clients: names. client: of each waiting, its
    index in `clients`. quotes: its charge should it start, float64. fresh: it did not wait at the
    plan before. left: sequences that waited then and no longer do, int64 [num_left]."""

    clients: list[str]
    client: NDArray[np.int64]
    quotes: NDArray[np.float64]
    fresh: NDArray[np.bool_]
    left: NDArray[np.int64]

    def before(self, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """Charges of the same client's requests that come before each in `order` (rows, int64
        [n]); float64 [n]."""
        rows = order[np.argsort(self.client[order], kind="stable")]
        sums = np.cumsum(self.quotes[rows]) - self.quotes[rows]
        first = np.flatnonzero(np.diff(self.client[rows], prepend=-1))
        sizes = np.diff(first, append=len(rows))
        out = np.empty(len(rows))
        out[rows] = sums - np.repeat(sums[first], sizes)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """What changes only when requests come or go, arrays of the queue's length. clients, client: as
    of Look. ids int64. weights: of each request's client, float64."""

    clients: list[str]
    client: NDArray[np.int64]
    ids: NDArray[np.int64]
    weights: NDArray[np.float64]


class Accounts:
    """The accounts of all clients.

    prompt_weight, output_weight: charge of a token. cached_weight: of a prompt token taken from the
    prefix cache. client_weights: a client's charges are divided by its weight, 1 if not given."""

    def __init__(
        self,
        prompt_weight: float,
        output_weight: float,
        cached_weight: float,
        client_weights: Mapping[str, float],
    ) -> None:
        for name, weight in client_weights.items():
            require(0 < weight < np.inf, f"client_weights[{name!r}]", "> 0 and finite", weight)
        self._charged: dict[str, float] = {}  # up to two steps ago, not divided by the weight
        self._prompt_weight = prompt_weight
        self._output_weight = output_weight
        self._cached_weight = cached_weight
        self._client_weights = dict(client_weights)
        self._names: dict[int, str] = {}  # of the table's labels
        self._tabs: dict[str, Tab] = {}  # of the requests that have not ended
        self._waiting: dict[int, Tab] = {}  # at the last look, by sequence
        self._paid: set[int] = set()  # of them, those whose request has started
        self._presumed: dict[Tab, float] = {}  # started, but not on record yet: their charges
        self._quotes = np.empty(0)  # at the last look, of `_queue`
        self._queue = Queue([], np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        self._looked = -1  # its step
        self._steps: Lagged[Charges] = Lagged()

    def on_step(self, event: StepEvent) -> None:
        """Note a step's charges for when they are due, and forget who ended. Of steps that went in
        one, all but the last are due when the next is planned."""
        prompts = []
        for choice in event.record.choices:
            tab = self._tabs.get(choice.request_id)
            if choice.kind in STARTED and tab is not None:
                prompts.append((tab, int(choice.detail["cached_tokens"])))
        record, num_whole = event.record, len(event.rows) - event.num_late
        last, before = record.step + record.steps - 1, record.steps - 1
        if before:
            self._steps.add(record.step, Charges(prompts, [], 0))
            prompts = []
            whole, late = self._open(event.rows[:num_whole]), self._open(event.rows[num_whole:])
            self._steps.add(last - 1, Charges([], whole, before))
            self._steps.add(last - 1, Charges([], late, record.steps - record.slices))
        self._steps.add(last, Charges(prompts, self._open(event.rows), 1))
        self._book(last + 1)  # what the next plan, at the earliest, may know
        for ended in event.finished:
            self._tabs.pop(ended.request_id, None)

    def look(self, query: OrderQuery, cached: NDArray[np.int32]) -> Look:
        """Bring the accounts up to this step's plan. cached: tokens of each waiting that the cache
        holds, int32 [n], to be taken off its charge."""
        self._book(query.step)
        ids, prompt = query.waiting.id, query.waiting.prompt
        if np.array_equal(ids, self._queue.ids):
            self._presumed = {}
            left, fresh = np.empty(0, np.int64), np.zeros(len(ids), np.bool_)
        else:
            left, fresh = self._exchange(query)
            self._queue = self._queue_of(query)
        queue = self._queue
        charge = prompt * self._prompt_weight
        charge = charge - np.minimum(cached, prompt) * (self._prompt_weight - self._cached_weight)
        self._quotes = charge / queue.weights
        if paid := self._paid.union(*(tab.waiting for tab in self._presumed)):
            self._quotes[np.isin(ids, np.fromiter(paid, np.int64, len(paid)))] = 0.0
        self._looked = query.step
        return Look(queue.clients, queue.client, self._quotes, fresh, left)

    def _queue_of(self, query: OrderQuery) -> Queue:
        labels, client = np.unique(query.waiting.client, return_inverse=True)
        clients = [self._names[label] for label in labels.tolist()]
        weights = np.array([self.weight(name) for name in clients])[client]
        return Queue(clients, client, query.waiting.id, weights)

    def of(self, client: str) -> float:
        """Charged and presumed so far, over the client's weight."""
        presumed = sum(charge for tab, charge in self._presumed.items() if tab.client == client)
        return self._charged.get(client, 0.0) / self.weight(client) + presumed

    def lift(self, client: str, least: float) -> None:
        """Raise what `of` says to `least`, if it is less."""
        short = max(least - self.of(client), 0.0)
        self._charge(client, short * self.weight(client))

    def weight(self, client: str) -> float:
        """The client's share of service against others'."""
        return self._client_weights.get(client, 1.0)

    def _open(self, rows: list[tuple[str, int]]) -> list[Tab]:
        return [self._tabs[one] for one, _ in rows if one in self._tabs]

    def _book(self, step: int) -> None:
        for charges in self._steps.due(step):
            for tab, cached in charges.prompts:
                if not tab.started:
                    tab.started = True
                    self._paid |= tab.waiting
                    tokens = (tab.prompt - cached) * self._prompt_weight
                    self._charge(tab.client, tokens + cached * self._cached_weight)
            for tab in charges.outputs:
                self._charge(tab.client, charges.tokens * self._output_weight)

    def _charge(self, client: str, tokens: float) -> None:
        self._charged[client] = self._charged.get(client, 0.0) + tokens

    def _exchange(self, query: OrderQuery) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Who left the queue since the last look, and which rows are new in it."""
        ids = query.waiting.id
        now = set(ids.tolist())
        left = np.array(sorted(self._waiting.keys() - now), np.int64)
        tabs = [self._leave(one) for one in left.tolist()]
        self._presumed = {}
        if len(left) and self._looked == query.step - 1:  # else it is on record who started
            quoted = self._queue.ids
            place = np.argsort(quoted)
            place = place[np.searchsorted(quoted, left, sorter=place)]
            for tab, charge in zip(tabs, self._quotes[place].tolist(), strict=True):
                if not tab.started:
                    self._presumed.setdefault(tab, charge)
        new = now - self._waiting.keys()
        fresh = np.isin(ids, np.fromiter(new, np.int64, len(new)))
        rows = np.flatnonzero(fresh).tolist()
        for row in rows:
            self._enter(query, int(ids[row]), int(query.waiting.client[row]))
        return left, fresh

    def _leave(self, one: int) -> Tab:
        tab = self._waiting.pop(one)
        tab.waiting.remove(one)
        self._paid.discard(one)
        return tab

    def _enter(self, query: OrderQuery, one: int, label: int) -> None:
        request = query.request(one)
        self._names[label] = request.client
        new = Tab(request.client, len(request.prompt))
        tab = self._tabs.setdefault(request.request_id, new)
        tab.waiting.add(one)
        self._waiting[one] = tab
        if tab.started:
            self._paid.add(one)
