"""Past-Future: lengths are drawn from those that ended, and the peak to come must fit.

Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025; LightLLM):
each request's output is drawn from the lengths of requests that ended, among those longer than what
it has emitted already; the candidate starts if memory holds at its fullest (future.py).
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, AdmissionQuery, RequestEvent, Verdict
from core.request import FinishReason
from core.table import RequestTable
from plugins.admission.at_once import reserve
from plugins.admission.future import copies, own_tokens, peak_pages, supply
from plugins.shared.run_info import RunInfo

ENDED = (FinishReason.stop.value, FinishReason.length.value)


class PastFuture:
    """Admit while the peak of one draw of lengths is within the pool. A request alone is always
    admitted.

    history: how many of the last ended outputs are drawn from. Where none ended yet, or none longer
    than what is out, a request is taken to reach its limit. Draws depend on the run's seed, the
    step and the candidate. An output counts from the second step after its request's last, when it
    is known whether launches overlap or not."""

    def __init__(self, history: int = 1000) -> None:
        require(history >= 1, "history", ">= 1", history)
        self.history = history
        self._seed = 0
        self._lengths: deque[int] = deque(maxlen=history)
        self._late: deque[tuple[int, int]] = deque()  # (last step of the request, length)
        self._sorted: NDArray[np.int64] | None = None  # the lengths, while they are the same

    @hookimpl
    def on_run_start(self, query: RunInfo) -> None:
        """Draws follow the run's seed."""
        self._seed = query.seed

    @hookimpl
    def on_request_finished(self, query: RequestEvent) -> None:
        """Note the output lengths of choices that ended by themselves."""
        choices = [choice for choice in query.record.choices if len(choice.steps)]
        last_step = max((choice.steps[-1] for choice in choices), default=0)
        self._settle(last_step - 1)
        for choice in choices:
            if choice.finish_reason in ENDED:
                self._late.append((last_step, len(choice.token_ids)))

    @hookimpl
    def decide_admission(self, query: AdmissionQuery) -> AdmissionDecision:
        """The peak of the running and the candidate, lengths drawn, against what they may use."""
        if query.pages_reserved_at_once:
            return reserve(query)
        if not len(query.running):
            return AdmissionDecision(Verdict.ADMIT, "nothing else runs")
        self._settle(query.step - 2)
        key = [self._seed & 0xFFFFFFFF, query.step, int(query.candidate.id[0])]
        draws = np.random.default_rng(key).random(len(query.running) + 1)
        left = np.concatenate(
            [self._left(query.running, draws[:-1]), self._left(query.candidate, draws[-1:])]
        )
        peak = peak_pages(own_tokens(query), left, copies(query), query.page_size)
        have = supply(query)
        text = f"peak of {peak} pages by {len(self._lengths)} past outputs, {have} to use"
        return AdmissionDecision(Verdict.ADMIT if peak <= have else Verdict.WAIT, text)

    def _settle(self, last_step: int) -> None:
        """Take in the outputs whose last step is not after `last_step`."""
        while self._late and self._late[0][0] <= last_step:
            self._lengths.append(self._late.popleft()[1])
            self._sorted = None

    def _left(self, rows: RequestTable, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Output still to come of each, drawn from the past given what is out; int64, >= 1."""
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, np.int64))
        past, emitted = self._sorted, rows.emitted.astype(np.int64)
        limit = rows.max_output.astype(np.int64)
        total = limit
        if len(past):
            first = np.searchsorted(past, emitted, side="right")  # the shortest longer one
            drawn = first + (draws * (len(past) - first)).astype(np.int64)
            known = first < len(past)
            total = np.where(known, past[np.minimum(drawn, len(past) - 1)], limit)
        return np.maximum(np.minimum(total, limit) - emitted, 1)
