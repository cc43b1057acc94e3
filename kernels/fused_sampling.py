"""The sampling kernels together, as an executor takes them (plugins/executor/sampling.py)."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from kernels.logprobs import logprobs
from kernels.penalties import count_tokens, edit, penalise
from kernels.sampling import SamplingConfig, draw
from kernels.vocabulary import Parameters


class FusedSampling:
    """Draws, penalties, edits and log-probabilities by Triton kernels. config: launch parameters,
    None = the default ones."""

    def __init__(self, config: SamplingConfig | None = None) -> None:
        self._config = config or SamplingConfig()

    def draw(self, logits: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """`kernels.sampling.draw`; columns: the fields of kernels.vocabulary.Parameters."""
        return draw(logits, Parameters(**columns), self._config)

    def penalise(
        self,
        logits: Tensor,
        at: Tensor,
        rows: Tensor,
        counts: tuple[Tensor, Tensor],
        factors: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """`kernels.penalties.penalise` with counts (outputs, prompts) and factors (repetition,
        presence, frequency)."""
        penalise(logits, at, rows, *counts, *factors)

    def edit(self, logits: Tensor, at: Tensor, tokens: Tensor, values: Tensor) -> None:
        """`kernels.penalties.edit`."""
        edit(logits, at, tokens, values)

    def count(self, outputs: Tensor, at: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """`kernels.penalties.count_tokens`."""
        count_tokens(outputs, at, rows, tokens)

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """`kernels.logprobs.logprobs`."""
        return logprobs(logits, tokens, num_top, self._config.scan)

    def describe(self) -> dict[str, Any]:
        """Name and launch parameters, for the manifest."""
        return {"name": "fused", **asdict(self._config)}
