"""How long steps take: what policies and a simulation ask, and the core never."""

from typing import Any, Protocol


class StepTimeModel(Protocol):
    """Predicts how long a step takes."""

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of steps with these figures of a StepRecord: numbers or arrays that broadcast."""
