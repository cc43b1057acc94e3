"""Virtual token counter: the client that was served least goes first (VTC, Sheng et al., OSDI 2024,
arXiv:2401.00588).

Each client has a counter of the service it got: `prompt_weight` for a prompt token, charged when
its request starts, `output_weight` for an output token, divided by the client's weight. The next to
start is the oldest request of the client with the least counter. A client that comes back to the
queue is lifted to the least counter of those in it (with nobody in it, to that of the client that
left it last), so that idle time earns no credit.

While two clients keep requests waiting, their service differs by at most 2 * max(prompt_weight *
longest prompt, output_weight * M), M the tokens that run at once, and by what one step serves,
since accounts are one step behind the plan.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Hold, OrderDecision, OrderQuery, StepEvent
from plugins.order.accounts import Accounts, Look


class Vtc:
    """prompt_weight, output_weight: the paper's w_p and w_q. client_weights: client -> weight, 1
    for others: a client of weight 2 is entitled to twice the service. Requests that name no client
    are those of one."""

    steady = True

    def __init__(
        self,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        client_weights: dict[str, float] | None = None,
    ) -> None:
        require(0 <= prompt_weight < np.inf, "prompt_weight", ">= 0 and finite", prompt_weight)
        require(0 < output_weight < np.inf, "output_weight", "> 0 and finite", output_weight)
        weights = client_weights or {}
        self._accounts = Accounts(prompt_weight, output_weight, prompt_weight, weights)
        self._ids = np.empty(0, np.int64)  # at the last plan; keys, clients' places in `_clients`
        self._keys = np.empty(0)
        self._client = np.empty(0, np.int64)
        self._clients: list[str] = []
        self._left_last: str | None = None  # the client whose request left the queue last

    @hookimpl
    def on_step(self, query: StepEvent) -> None:
        """Note the step's service."""
        self._accounts.on_step(query)

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Key: the client's counter when the request's turn comes, were all before it started; for
        this step alone."""
        waiting = query.waiting
        look = self._accounts.look(query, np.zeros(len(waiting), np.int32))
        if len(look.left):
            gone = np.flatnonzero(np.isin(self._ids, look.left))
            last = gone[self._keys[gone].argmax()]
            self._left_last = self._clients[self._client[last]]
        order = np.lexsort((waiting.arrival_order, waiting.preemptions == 0))
        self._lift(look, order)
        counters = np.array([self._accounts.of(client) for client in look.clients])
        self._keys = counters[look.client] + look.before(order)
        self._ids, self._client, self._clients = waiting.id, look.client, look.clients
        return OrderDecision(self._keys, Hold.STEP, "client served least")

    def _lift(self, look: Look, order: NDArray[np.int64]) -> None:
        """Raise the counters of clients that came to the queue, in the order of their requests."""
        if not np.count_nonzero(look.fresh):
            return
        accounts = self._accounts
        active = {look.clients[index] for index in np.unique(look.client[~look.fresh]).tolist()}
        came = look.client[order][look.fresh[order]]
        for client in dict.fromkeys(look.clients[index] for index in came.tolist()):
            if client in active:
                continue
            if active:
                least = min(map(accounts.of, active))
            else:
                least = 0.0 if self._left_last is None else accounts.of(self._left_last)
            accounts.lift(client, least)
            active.add(client)
