"""Least slack first (deadline scheduling; for LLM serving Niyama, arXiv:2503.22562).

slack = deadline - now - predicted time left, where the time left is a fixed time for each token
still to compute and each token still to emit. `now` is the same for all, so the order is that of
`deadline - time left`, the latest moment to start. A request whose moment has passed must miss its
deadline: it gives way to those that can still keep theirs. Requests without a deadline come last,
and nothing bounds their wait.

With both times 0 it is earliest deadline first, and a request is demoted once its deadline passed.
The clock decides about demotion alone.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Hold, OrderDecision, OrderQuery

KEEPS, MISSES, NONE = 0.0, 1.0, 2.0  # classes of requests, first to last


class Slack:
    """prompt_token_s, output_token_s: predicted seconds for a token to compute and a token to
    emit, as measured on the device (a step's time / its tokens; the time between tokens)."""

    starves = "without a deadline a request waits while others have one"

    def __init__(self, prompt_token_s: float = 0.0, output_token_s: float = 0.0) -> None:
        require(0 <= prompt_token_s < np.inf, "prompt_token_s", ">= 0 and finite", prompt_token_s)
        require(0 <= output_token_s < np.inf, "output_token_s", ">= 0 and finite", output_token_s)
        self.prompt_token_s = prompt_token_s
        self.output_token_s = output_token_s

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Those that can keep their deadline by latest start, those that must miss it likewise,
        those without by arrival. Keys hold until the first of them must miss."""
        waiting = query.waiting
        left_s = waiting.remaining * self.prompt_token_s
        left_s = left_s + waiting.predicted_remaining * self.output_token_s
        latest_s = waiting.deadline_s - left_s
        dated = np.isfinite(latest_s)
        keeps = dated & (latest_s >= query.now_s)
        kind = np.where(keeps, KEEPS, np.where(dated, MISSES, NONE))
        keys = np.stack([kind, np.where(dated, latest_s, waiting.arrival_s)], axis=1)
        hold = float(latest_s[keeps].min()) if keeps.any() else Hold.ALWAYS
        return OrderDecision(keys, hold, "least slack")
