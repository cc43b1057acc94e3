"""What the executor asks of sampling kernels, where the config names some instead of torch."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class SamplingKernels(Protocol):
    """Kernels for k rows of logits [k, vocab_size]: float32, or for `draw` also what a model of
    lower precision gives. None of them waits for the device."""

    def draw(self, logits: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Tokens int64 [k], -1 for a row that holds a NaN or +inf, or -inf alone. columns [k]:
        temperature (0 = greedy), top_k (0 or >= vocab_size = off), top_p (>= 1 = off), min_p_log
        (-inf = off), and the noise's seed, position, choice."""

    def penalise(
        self,
        logits: Tensor,
        at: Tensor,
        rows: Tensor,
        counts: tuple[Tensor, Tensor],
        factors: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Penalise rows `at` [n] in place. rows [k]: their row in counts, which are output counts
        int32 and prompt marks bool [num_rows, vocab_size]; factors [n]: repetition, presence,
        frequency."""

    def edit(self, logits: Tensor, at: Tensor, tokens: Tensor, values: Tensor) -> None:
        """Add values [e] to logits[at, tokens] in place; repeated places add up."""

    def count(self, outputs: Tensor, at: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """One more of tokens[at] in row rows[at] of the output counts; at [n], the others [k]."""

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of tokens int64 [k], and ids int64 and log-probabilities [k, num_top]
        of the best, best first; a masked token gets -inf, and every token of a row that holds a NaN
        or +inf gets NaN."""

    def describe(self) -> dict[str, Any]:
        """Name and launch parameters, for the manifest."""
