"""The true output length, where the workload fixes it: the bound for every prediction.

Not a policy one could deploy. The core shows forced lengths to this predictor alone and labels the
run; any order, admission or victim rule that reads predictions becomes its oracle form beside it.
"""

from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.queries import LengthPredictorQuery
from core.records import RequestRecord
from core.request import Request


class Oracle:
    """Knows requests with a forced length, and those that ignore end tokens, which reach their
    limit."""

    oracle = True

    @hookimpl
    def build_length_predictor(self, query: LengthPredictorQuery) -> "Oracle":
        """The predictor itself: it keeps no state."""
        return self

    def predict(self, request: Request) -> float:
        """Output tokens, exactly. Raises ConfigError for a request whose length nobody knows."""
        params = request.params
        ends_at_limit = params.ignore_eos and not params.stop_token_ids
        if request.forced_output is None and not ends_at_limit:
            raise ConfigError(
                f"forced_output of request {request.request_id!r} must be given for the predictor"
                " oracle, got None: its length depends on the tokens that will be drawn"
            )
        return float(request.output_limit)

    def observe(self, record: RequestRecord) -> None:
        """Nothing is learnt."""
