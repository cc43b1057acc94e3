"""Skip-join multi-level feedback queue with preemption at token grain (FastServe, Wu et al.,
NSDI 2026, arXiv:2305.05920).

Levels have quanta that double. A request joins the first level whose quantum holds the time of its
prompt, instead of sinking through those above it; once it used up the quantum of its level, it
sinks one. Lower levels wait for higher ones: a waiting request of a higher level displaces running
ones of lower levels, which resume where they were. FastServe swaps their KV to the host; here it is
computed again, so small quanta buy a short time to the first token with a longer one to the last.
A request that waited too long goes back to the first level.

Time is counted in iterations: one for an output token, one for `prompt_tokens_per_iteration` of the
prompt. So levels follow from what a request has emitted, whatever the speed of the device.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import (
    Cause,
    Hold,
    OrderDecision,
    OrderQuery,
    PreemptionDecision,
    PreemptionQuery,
    RequestEvent,
)
from core.table import RequestTable


class Mlfq:
    """quantum: iterations of the first level. levels: the last one has no quantum.
    prompt_tokens_per_iteration: prompt tokens that take the time of one output token.
    promote_after: steps of waiting after which a request goes to the first level, where only
    earlier arrivals are before it."""

    displaces = True

    def __init__(
        self,
        quantum: int = 4,
        levels: int = 8,
        prompt_tokens_per_iteration: int = 256,
        promote_after: int = 1000,
    ) -> None:
        require(quantum >= 1, "quantum", ">= 1", quantum)
        require(1 <= levels <= 32, "levels", "in [1, 32]", levels)
        per = prompt_tokens_per_iteration
        require(per >= 1, "prompt_tokens_per_iteration", ">= 1", per)
        require(promote_after >= 1, "promote_after", ">= 1", promote_after)
        self.quantum = quantum
        self.levels = levels
        self.prompt_tokens_per_iteration = per
        self.promote_after = self.starvation_bound_steps = promote_after
        self._since: dict[int, int] = {}  # id -> step at which it began to wait
        self._promoted: dict[int, int] = {}  # id -> tokens emitted at its promotion
        self._ids: dict[str, list[int]] = {}  # request -> its promoted ids

    @hookimpl
    def on_request_finished(self, query: RequestEvent) -> None:
        """Forget a request."""
        for one in self._ids.pop(query.request.request_id, []):
            del self._promoted[one]

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Keys: level, arrival; for this step alone."""
        waiting = query.waiting
        self._promote(query)
        keys = np.stack([self.level(waiting), waiting.arrival_s], axis=1)
        return OrderDecision(keys, Hold.STEP, "highest level of the feedback queue")

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision:
        """Lowest level first, then latest admission; for a beneficiary only levels below its own,
        and none that computes its prompt: FastServe interrupts between iterations."""
        rows = query.candidates
        level = self.level(rows)
        order = np.lexsort((-rows.admitted_order, -level))
        if query.cause is not Cause.PAGES and query.beneficiary is not None:
            gives_way = (level > self.level(query.beneficiary)[0]) & (rows.remaining == 1)
            order = order[gives_way[order]]
        return PreemptionDecision(rows.id[order], "lowest level of the feedback queue")

    def level(self, rows: RequestTable) -> NDArray[np.int64]:
        """Levels from what each was served, 0 the highest; int64."""
        emitted = rows.emitted
        at = np.array([self._promoted.get(one, -1) for one in rows.id.tolist()], np.int64)
        prompt = np.ceil(rows.prompt / self.prompt_tokens_per_iteration)
        # The prompt's iterations yield the first token; a promoted request starts from nothing.
        used = np.where(emitted > 0, prompt + emitted - 1, 0)
        used = np.where(at >= 0, emitted - at, used) / self.quantum
        joined = np.where(at >= 0, 1.0, 2.0 ** self._joined(prompt))
        # Quanta are 1, 2, 4 ...: those of levels j .. l sum to 2**(l + 1) - 2**j.
        level: NDArray[np.int64] = np.frexp(used + joined)[1].astype(np.int64) - 1
        return np.minimum(level, self.levels - 1)

    def _joined(self, prompt: NDArray[np.float64]) -> NDArray[np.int64]:
        """The first level whose quantum is at least the prompt's iterations."""
        level = np.ceil(np.log2(np.maximum(prompt / self.quantum, 1.0)))
        return level.astype(np.int64)

    def _promote(self, query: OrderQuery) -> None:
        ids = query.waiting.id.tolist()
        self._since = {one: self._since.get(one, query.step) for one in ids}
        late = [one for one in ids if query.step - self._since[one] >= self.promote_after]
        emitted = dict(zip(ids, query.waiting.emitted.tolist(), strict=True)) if late else {}
        for one in late:
            if one not in self._promoted:
                self._ids.setdefault(query.request(one).request_id, []).append(one)
            self._promoted[one] = emitted[one]
