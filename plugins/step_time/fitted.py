"""A step's time, learnt while the engine runs: linear in what a step computes.

    seconds = a + b * rows + c * tokens + d * context tokens read + e * pairs of query and key

is least squares of relative errors over past steps, each counting by its tokens, older ones less,
with no coefficient below 0: more work never takes less time, whatever noise says. By tokens, since
steps are no straight line (small ones wait for memory) and policies ask about large ones, which are
rare; relative, so that a late step cannot outweigh the others. Some directions are hardly ever seen
(a decode row is a token); along those a small pull to the prior decides.
"""

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import StepEvent, StepTimeQuery

Float = NDArray[np.float64]
NUM, TOKENS = 5, 2  # coefficients; the one of tokens
SUBSETS = np.array(list(product((0.0, 1.0), repeat=NUM)))  # which of them are not 0; [2^NUM, NUM]


class Fitted:
    """prior_step_s, prior_token_s: seconds of a step and of a token before anything is known.
    pull: weight of the prior, as a share of that of the steps seen. memory_steps: after so many
    steps one counts 1/e of a new one. refit_every: steps between fits; the first ones come at once.

    A step lasts from its start, or the end of the one before if that is later (launches overlap),
    until its tokens are there: what a stream waits for. Steps that went in one count as so many of
    their mean. Nothing is learnt where another plugin answers `build_step_time_model`."""

    steady = True

    def __init__(
        self,
        prior_step_s: float = 0.01,
        prior_token_s: float = 0.0001,
        pull: float = 0.0001,
        memory_steps: int = 1000,
        refit_every: int = 16,
    ) -> None:
        require(prior_step_s > 0, "step_time.prior_step_s", "> 0", prior_step_s)
        require(prior_token_s >= 0, "step_time.prior_token_s", ">= 0", prior_token_s)
        require(pull > 0, "step_time.pull", "> 0", pull)
        require(memory_steps >= 1, "step_time.memory_steps", ">= 1", memory_steps)
        require(refit_every >= 1, "step_time.refit_every", ">= 1", refit_every)
        self.prior_step_s = prior_step_s
        self.prior_token_s = prior_token_s
        self.pull = pull
        self.memory_steps = memory_steps
        self.refit_every = refit_every
        self.num_steps = 0  # records of steps seen
        self._prior = np.array([prior_step_s, 0.0, prior_token_s, 0.0, 0.0])
        self._gram = np.zeros((NUM, NUM))
        self._moment = np.zeros(NUM)
        self._new: list[tuple[float, ...]] = []  # steps not in the sums: facts, seconds, how many
        self._last_end_s = -np.inf
        self._built = False
        self._coefficients: list[float] | None = self._prior.tolist()  # None: to be worked out

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> "Fitted":
        """Itself."""
        self._built = True
        return self

    @property
    def coefficients(self) -> list[float]:
        """Of the formula above, as far as steps are in the sums."""
        if self._coefficients is None:
            self._coefficients = self._solve().tolist()
        return self._coefficients

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of steps; numbers or arrays that broadcast."""
        step, row, token, kv_token, pair = self.coefficients
        return step + row * num_rows + token * num_tokens + kv_token * kv_tokens + pair * attended

    @hookimpl
    def on_step(self, query: StepEvent) -> None:
        """Learn from a committed step that computed something."""
        if not self._built:
            return
        record = query.record
        seconds = (record.end_s - max(record.start_s, self._last_end_s)) / record.steps
        self._last_end_s = record.end_s
        if not record.num_rows or seconds <= 0:
            return
        tokens = record.prefill_tokens + record.decode_tokens
        sums = tokens, record.kv_tokens, record.attended
        facts = 1.0, record.num_rows, *(total / record.steps for total in sums)
        self._new.append((*facts, seconds, record.steps))
        self.num_steps += 1
        young = self.num_steps < self.refit_every and self.num_steps & (self.num_steps - 1) == 0
        if young or len(self._new) == self.refit_every:
            self._refit()

    def _refit(self) -> None:
        steps = np.array(self._new)
        self._new.clear()
        facts, seconds, counts = steps[:, :NUM], steps[:, NUM], steps[:, NUM + 1]
        ages = np.arange(len(steps))[::-1]
        weights = counts * np.exp(-ages / self.memory_steps) * facts[:, TOKENS] / seconds**2
        faded = np.exp(-len(steps) / self.memory_steps)
        self._gram = faded * self._gram + (facts.T * weights) @ facts
        self._moment = faded * self._moment + facts.T @ (weights * seconds)
        self._coefficients = None

    def _solve(self) -> Float:
        """Coefficients >= 0 of least squared relative error, with the pull to the prior."""
        scale = np.sqrt(np.diag(self._gram))  # a column's size, so that the sums can be inverted
        scale = np.where(scale > 0, scale, 1.0)
        gram = self._gram / np.outer(scale, scale) + self.pull * np.eye(NUM)
        moment = self._moment / scale + self.pull * self._prior * scale
        return non_negative(gram, moment) / scale


def non_negative(gram: Float, moment: Float) -> Float:
    """The x >= 0 that minimises x gram x / 2 - moment x, gram positive definite [5, 5]: of the
    solutions with some components held at 0, the best that is feasible. Exact, since the optimum is
    one of these."""
    masked = SUBSETS[:, :, None] * gram * SUBSETS[:, None, :]
    masked[:, range(NUM), range(NUM)] += 1 - SUBSETS
    found = np.linalg.solve(masked, (SUBSETS * moment)[:, :, None])[:, :, 0]
    cost = 0.5 * np.einsum("si,ij,sj->s", found, gram, found) - found @ moment
    cost[(found < 0).any(axis=1)] = np.inf  # all zeros is feasible
    best: Float = found[cost.argmin()]
    return best
