"""Deficit longest prefix match: longest prefix first among clients that have not had their share
(DLPM, Cao et al., arXiv:2501.14312).

Each client has an allowance. Requests start in order of cached prefix, but only those of clients
with an allowance above 0; what starts is charged `prompt_weight` for each prompt token that the
cache does not hold, and `output_weight` for each output token. When no waiting client is left above
0, each client gets `quantum` more. A large quantum is longest prefix first, a small one is fair and
loses locality. Weighted, a client's charges are divided by its weight.

A client that does not wait gets its quanta too while it is in debt, but saves up no more than one.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Hold, OrderDecision, OrderQuery, StepEvent
from plugins.order.accounts import Accounts
from plugins.order.prefixes import by_arrival, cached_tokens


class Dlpm:
    """quantum: weighted tokens of allowance in a refill. window: how many of the oldest are
    matched with the cache in a step; later ones count as if they had no match."""

    steady = True
    starves = "without a match a request waits until others used up their quantum"

    def __init__(
        self,
        quantum: float = 4096.0,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        client_weights: dict[str, float] | None = None,
        window: int = 128,
    ) -> None:
        require(0 < quantum < np.inf, "quantum", "> 0 and finite", quantum)
        require(0 <= prompt_weight < np.inf, "prompt_weight", ">= 0 and finite", prompt_weight)
        require(0 < output_weight < np.inf, "output_weight", "> 0 and finite", output_weight)
        require(window >= 1, "window", ">= 1", window)
        self.quantum = quantum
        self.window = window
        self._accounts = Accounts(prompt_weight, output_weight, 0.0, client_weights or {})
        self._granted: dict[str, float] = {}
        self._ids = np.empty(0, np.int64)  # at the last plan
        self._refills = np.empty(0)  # then: refills before the request's turn
        self._clients: set[str] = set()  # that waited then

    @hookimpl
    def on_step(self, query: StepEvent) -> None:
        """Note the step's service."""
        self._accounts.on_step(query)

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Keys: refills before the request's turn comes, then longest cached prefix; for this step
        alone."""
        waiting = query.waiting
        cached = cached_tokens(query, by_arrival(query)[: self.window])
        look = self._accounts.look(query, cached)
        self._refill(look.left)
        for client in look.clients:
            self._granted.setdefault(client, self.quantum)
        order = np.lexsort((waiting.arrival_order, waiting.preemptions == 0, -cached))
        allowance = np.array([self.allowance(client) for client in look.clients])
        short = look.before(order) - allowance[look.client]
        self._refills = np.where(short < 0, 0, np.floor(short / self.quantum) + 1)
        self._ids, self._clients = waiting.id, set(look.clients)
        keys = np.stack([self._refills, -cached], axis=1)
        return OrderDecision(keys, Hold.STEP, "longest cached prefix of clients with allowance")

    def allowance(self, client: str) -> float:
        """What a client may still be served; <= 0: nothing until the next refill."""
        return self._granted[client] - self._accounts.of(client)

    def _refill(self, left: NDArray[np.int64]) -> None:
        """Make good the refills that the starts of the last step rested on: as many as the last
        starter needed, and no more than any that did not start still waits for."""
        gone = np.isin(self._ids, left)
        needed = self._refills[gone].max(initial=0)
        num = min(needed, self._refills[~gone].min(initial=needed))
        for client in self._granted if num else ():
            grant = float(num * self.quantum)
            if client not in self._clients:
                grant = min(grant, max(self.quantum - self.allowance(client), 0.0))
            self._granted[client] += grant
