"""Several replicas as one: the bound of any router.

A machine with the memory of `replicas` and so many times their speed in every respect serves any
sequence of steps no later than they could together, however requests were spread over them. No such
machine exists: one request alone is served that much faster, too.
"""

from typing import Any

from core.config import require
from core.hookspecs import hookimpl
from core.queries import StepTimeQuery
from plugins.shared.step_time import StepTimeModel


class Pooled:
    """of: the model of a replica's step. replicas: how many are one."""

    def __init__(self, of: Any, replicas: int = 8) -> None:
        known = callable(getattr(of, "seconds", None))
        require(known, "step_time.of", "a model with a method seconds", of)
        require(replicas >= 1, "step_time.replicas", ">= 1", replicas)
        self.of: StepTimeModel = of
        self.replicas = replicas

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> "Pooled":
        """Itself: it learns nothing."""
        return self

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of steps; numbers or arrays that broadcast."""
        return self.of.seconds(num_rows, num_tokens, kv_tokens, attended) / self.replicas

    def pool_tokens(self, memory_share: float) -> int:
        """KV slots of all. Raises AttributeError if a replica's model knows none."""
        tokens: int = self.replicas * self.of.pool_tokens(memory_share)  # type: ignore[attr-defined]
        return tokens

    def describe(self) -> dict[str, Any]:
        """What the figures stand for."""
        describe = getattr(self.of, "describe", dict)
        return {**describe(), "pooled": self.replicas, "error": None}
