"""Shortest job first: by predicted output length, the whole of it.

The textbook rule on predictions (LTR, Fu et al., NeurIPS 2024, ranks by a learned one). With the
predictor `oracle` it is SJF with true lengths, and the run is labelled so. Nothing bounds the wait
of a long request while shorter ones keep coming.
"""

import numpy as np

from core.hookspecs import hookimpl
from core.queries import OrderDecision, OrderQuery


class Sjf:
    """Keys: predicted output within the request's limit, then arrival."""

    starves = "long requests wait while shorter ones keep coming"

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Least predicted output first; keys never change, since predictions do not."""
        waiting = query.waiting
        total = np.minimum(waiting.predicted_output, waiting.max_output)
        keys = np.stack([total, waiting.arrival_s], axis=1)
        return OrderDecision(keys, reason="shortest predicted output")
