"""What each client was served, as a fair order may count it: the same with and without overlap.

A request is charged for its prompt when it first starts, and for each output token; what is
computed again after a preemption is the engine's loss, not the client's service. Charges come from
step records two steps old (see lagged.py); a request that left the queue in the last step is
presumed to have started, so that one client's requests do not all start on the same old account.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.queries import OrderQuery, StepEvent
from plugins.order.lagged import Lagged

STARTED = ("admitted", "resumed")  # resumed: also one preempted within the step that admitted it


@dataclass(slots=True, eq=False)
class Tab:
    """One request's account."""

    client: str
    prompt: int
    started: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Charges:
    """Of one step: tabs whose prompt is charged, with the tokens, and a tab for each output."""

    prompts: list[tuple[Tab, int]]
    outputs: list[Tab]


class Accounts:
    """charged: client -> tokens charged, weighted, up to two steps ago; `of` adds what is presumed.

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
        self.charged: dict[str, float] = {}
        self._prompt_weight = prompt_weight
        self._output_weight = output_weight
        self._cached_weight = cached_weight
        self._client_weights = dict(client_weights)
        self._tabs: dict[str, Tab] = {}  # of the requests that have not ended
        self._waiting: dict[int, Tab] = {}  # at the last look, by sequence
        self._quotes: dict[int, float] = {}  # then: the charge if it starts
        self._presumed: dict[str, float] = {}  # client -> charges not on record yet
        self._presumed_tabs: set[Tab] = set()
        self._looked = -1
        self._steps: Lagged[Charges] = Lagged()

    def on_step(self, event: StepEvent) -> None:
        """Note a step's charges for when they are due, and forget who ended."""
        prompts = []
        for choice in event.record.choices:
            tab = self._tabs.get(choice.request_id)
            if choice.kind in STARTED and tab is not None:
                prompts.append((tab, int(choice.detail["cached_tokens"])))
        outputs = [self._tabs[one] for one in event.request_ids if one in self._tabs]
        self._steps.add(event.record.step, Charges(prompts, outputs))
        self._book(event.record.step + 1)  # what the next plan, at the earliest, may know
        for record in event.finished:
            self._tabs.pop(record.request_id, None)

    def look(self, query: OrderQuery, cached: NDArray[np.int32]) -> "Look":
        """Bring the accounts up to this step's plan. cached: tokens of each waiting that the cache
        holds, int32 [n], to be taken off its charge."""
        self._book(query.step)
        waiting = {one: self._tab(query, one) for one in query.waiting.id.tolist()}
        left = [one for one in self._waiting if one not in waiting]
        stayed = {tab.client for one, tab in self._waiting.items() if one in waiting}
        self._presume(left if self._looked == query.step - 1 else [])
        tabs = list(waiting.values())
        prompt = np.array([tab.prompt for tab in tabs], np.float64)
        charge = prompt * self._prompt_weight
        charge -= np.minimum(cached, prompt) * (self._prompt_weight - self._cached_weight)
        charge /= [self.weight(tab.client) for tab in tabs]
        owes = np.array([not (t.started or t in self._presumed_tabs) for t in tabs], np.bool_)
        quotes = np.where(owes, charge, 0.0)
        self._waiting, self._looked = waiting, query.step
        self._quotes = dict(zip(waiting, quotes.tolist(), strict=True))
        return Look([tab.client for tab in tabs], quotes, left, stayed)

    def of(self, client: str) -> float:
        """Charged and presumed so far."""
        return self.charged.get(client, 0.0) + self._presumed.get(client, 0.0)

    def weight(self, client: str) -> float:
        """The client's share of service against others'."""
        return self._client_weights.get(client, 1.0)

    def _book(self, step: int) -> None:
        for charges in self._steps.due(step):
            for tab, cached in charges.prompts:
                if not tab.started:
                    tab.started = True
                    tokens = (tab.prompt - cached) * self._prompt_weight
                    self._charge(tab.client, tokens + cached * self._cached_weight)
            for tab in charges.outputs:
                self._charge(tab.client, self._output_weight)

    def _charge(self, client: str, tokens: float) -> None:
        self.charged[client] = self.charged.get(client, 0.0) + tokens / self.weight(client)

    def _presume(self, left: list[int]) -> None:
        self._presumed, self._presumed_tabs = {}, set()
        for one in left:
            tab = self._waiting[one]
            if not tab.started and tab not in self._presumed_tabs:
                self._presumed_tabs.add(tab)
                sofar = self._presumed.get(tab.client, 0.0)
                self._presumed[tab.client] = sofar + self._quotes[one]

    def _tab(self, query: OrderQuery, one: int) -> Tab:
        tab = self._waiting.get(one)
        if tab is None:
            request = query.request(one)
            new = Tab(request.client, len(request.prompt))
            tab = self._tabs.setdefault(request.request_id, new)
        return tab


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The queue at one plan. clients: of each waiting. quotes: its charge should it start, float64
    [n]. left: sequences that waited at the plan before and no longer do. stayed: clients of those
    that waited then and still do."""

    clients: list[str]
    quotes: NDArray[np.float64]
    left: list[int]
    stayed: set[str]

    def before(self, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """Charges of the same client's requests that come before each in `order` (rows, int64
        [n]); float64 [n]."""
        names = {client: label for label, client in enumerate(dict.fromkeys(self.clients))}
        labels = np.array([names[client] for client in self.clients], np.int64)
        rows = order[np.argsort(labels[order], kind="stable")]
        sums = np.cumsum(self.quotes[rows]) - self.quotes[rows]
        first = np.flatnonzero(np.diff(labels[rows], prepend=-1))
        sizes = np.diff(first, append=len(rows))
        out = np.empty(len(rows))
        out[rows] = sums - np.repeat(sums[first], sizes)
        return out
