"""Output length as a quantile of the lengths seen last, of the same client if there are enough.

The history window is that of Past-Future (Gong et al., ASPLOS 2025: new requests are as long as
recent ones); a quantile of it is the plainest use. High quantiles make admission careful, 0.5 is
for orders.
"""

import math
from bisect import bisect_left, insort
from collections import deque

from core.config import require
from core.hookspecs import hookimpl
from core.queries import LengthPredictorQuery
from core.records import RequestRecord
from core.request import Request
from plugins.shared.metrics import COMPLETED


class HistoryQuantile:
    """quantile: of the lengths in the window, the least that so great a share does not exceed.
    window: lengths kept, for all and for each client. min_observations: below it a client's own
    lengths do not count, and below it in all the prior stands. prior_share: expected output / limit
    until then. Only outputs that came to their end are observed; no prediction exceeds max_tokens,
    and a request that ignores end tokens is expected to reach it."""

    def __init__(
        self,
        quantile: float = 0.5,
        window: int = 1000,
        min_observations: int = 10,
        prior_share: float = 0.5,
    ) -> None:
        require(0 < quantile <= 1, "quantile", "in (0, 1]", quantile)
        require(window >= 1, "window", ">= 1", window)
        rule = f">= 1 and <= window ({window})"
        require(1 <= min_observations <= window, "min_observations", rule, min_observations)
        require(0 < prior_share <= 1, "prior_share", "in (0, 1]", prior_share)
        self.quantile = quantile
        self.window = window
        self.min_observations = min_observations
        self.prior_share = prior_share

    @hookimpl
    def build_length_predictor(self, query: LengthPredictorQuery) -> "History":
        """A predictor with a history of its own for each engine."""
        return History(self)


class History:
    """The predictor of one run."""

    def __init__(self, plugin: HistoryQuantile) -> None:
        self._plugin = plugin
        self._all = Window(plugin.window)
        self._clients: dict[str, Window] = {}

    def predict(self, request: Request) -> float:
        """Expected output tokens, >= 1 unless the limit is 0."""
        limit, enough = request.params.max_tokens, self._plugin.min_observations
        if request.params.ignore_eos:
            return float(limit)
        own = self._clients.get(request.client)
        seen = own if own is not None and len(own) >= enough else self._all
        if len(seen) < enough:
            return limit * self._plugin.prior_share
        return float(min(seen.quantile(self._plugin.quantile), limit))

    def observe(self, record: RequestRecord) -> None:
        """Take in the lengths of a request's choices, but for those cut off."""
        for choice in record.choices:
            if choice.finish_reason in COMPLETED:
                own = self._clients.setdefault(record.client, Window(self._plugin.window))
                for window in (self._all, own):
                    window.add(len(choice.token_ids))


class Window:
    """The last `size` lengths, in the order of coming and sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        """Enter a length; the oldest leaves a full window."""
        if len(self._recent) == self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float) -> int:
        """The least length that at least this share of the window does not exceed."""
        # One part in 10^9 less: 0.07 * 100 is a little more than 7 in binary.
        rank = math.ceil(share * len(self._sorted) * (1 - 1e-9))
        return self._sorted[max(rank, 1) - 1]
