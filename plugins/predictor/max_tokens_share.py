"""Output length as a fixed share of the request's limit: no learning, no oracle."""

from core.config import require
from core.hookspecs import hookimpl
from core.queries import LengthPredictorQuery
from core.records import RequestRecord
from core.request import Request


class MaxTokensShare:
    """share: expected output / limit. A request that ignores end tokens is expected to reach its
    limit."""

    def __init__(self, share: float = 0.5) -> None:
        require(0 < share <= 1, "share", "in (0, 1]", share)
        self.share = share

    @hookimpl
    def build_length_predictor(self, query: LengthPredictorQuery) -> "MaxTokensShare":
        """The predictor itself: it keeps no state."""
        return self

    def predict(self, request: Request) -> float:
        """Expected output tokens."""
        limit = request.params.max_tokens
        return float(limit) if request.params.ignore_eos else limit * self.share

    def observe(self, record: RequestRecord) -> None:
        """Nothing is learnt."""
