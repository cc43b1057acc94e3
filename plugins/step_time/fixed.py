"""A step's time from coefficients in the config: nothing is learnt."""

from typing import Any

from core.config import require
from core.hookspecs import hookimpl
from core.queries import StepTimeQuery


class Fixed:
    """seconds = step_s + row_s * rows + token_s * tokens + kv_token_s * context tokens read
    + pair_s * pairs of a new token and one that it attends to."""

    def __init__(
        self,
        step_s: float = 0.01,
        row_s: float = 0.0,
        token_s: float = 0.0001,
        kv_token_s: float = 0.0,
        pair_s: float = 0.0,
    ) -> None:
        given = {"step_s": step_s, "row_s": row_s, "token_s": token_s}
        for name, value in (given | {"kv_token_s": kv_token_s, "pair_s": pair_s}).items():
            require(value >= 0, f"step_time.{name}", ">= 0", value)
        self.step_s = step_s
        self.row_s = row_s
        self.token_s = token_s
        self.kv_token_s = kv_token_s
        self.pair_s = pair_s

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> "Fixed":
        """Itself: it keeps no state."""
        return self

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of a step; see the class."""
        return (
            self.step_s
            + self.row_s * num_rows
            + self.token_s * num_tokens
            + self.kv_token_s * kv_tokens
            + self.pair_s * attended
        )
