"""SGLang's new-token ratio: the running are expected to use a share of what they may still emit,
which sinks while all goes well and jumps after a preemption.

The rule of sglang's PrefillAdder and ScheduleBatch.retract_decode (Zheng et al., NeurIPS 2024, and
its code), restated: admit while

    sum over the running of min(left, clip) * ratio  +  candidate's new tokens + min(left, clip)

is within free + evictable memory. The ratio starts at `start`, sinks in equal parts over
`decay_steps` decode steps to start * floor_share, and after a preemption is (tokens out + headroom
* requests) / (tokens they may emit at most + 1) of those that run on, at most 1.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, AdmissionQuery, StepEvent, Verdict
from core.table import RequestTable
from plugins.admission.at_once import reserve


class NewTokenRatio:
    """start, floor_share, decay_steps, headroom_tokens, clip_tokens: see the file; the defaults are
    sglang's. Requests that ignore end tokens will reach their limit: their ratio is 1, and so it is
    for those admitted in the same step. With an idle engine the ratio is `start` again. A request
    alone is always admitted.

    Decode steps and preemptions count from the second step after, when they are known whether
    launches overlap or not; a victim that asks to come back in the step after counts at once."""

    steady = True

    def __init__(
        self,
        start: float = 0.7,
        floor_share: float = 0.14,
        decay_steps: int = 600,
        headroom_tokens: int = 20,
        clip_tokens: int = 4096,
    ) -> None:
        require(0 < start <= 1, "start", "in (0, 1]", start)
        require(0 <= floor_share <= 1, "floor_share", "in [0, 1]", floor_share)
        require(decay_steps >= 1, "decay_steps", ">= 1", decay_steps)
        require(headroom_tokens >= 0, "headroom_tokens", ">= 0", headroom_tokens)
        require(clip_tokens >= 1, "clip_tokens", ">= 1", clip_tokens)
        self.start = start
        self.floor = start * floor_share
        self.decay = (start - self.floor) / decay_steps
        self.headroom_tokens = headroom_tokens
        self.clip_tokens = clip_tokens
        self.ratio = start
        self._late: deque[tuple[int, bool, bool]] = deque()  # step, did it decode, did it preempt
        self._preempted = False  # and the ratio does not show it yet
        self._counted = -1  # preemptions up to this step are in the ratio
        self._endless: dict[int, bool] = {}  # running id -> does it ignore end tokens
        self._step = -1  # the step last asked about, and the admissions before it
        self._admissions = 0

    @hookimpl
    def on_step(self, query: StepEvent) -> None:
        """Note whether the step, or each of those that went in one, decoded and preempted."""
        record = query.record
        self._settle(record.step - 1)
        preempted = any(choice.kind == "preempted" for choice in record.choices)
        decoded = record.decode_tokens > 0
        # Slices of steps that went in one: who has them decodes after their last.
        after = record.num_rows * (record.steps - record.slices)
        each = [record.decode_tokens > after] * record.slices
        each += [decoded] * (record.steps - record.slices)
        for step, one in enumerate(each, record.step):
            self._late.append((step, one, preempted and step == record.step))

    @hookimpl
    def decide_admission(self, query: AdmissionQuery) -> AdmissionDecision:
        """Expected growth and the candidate's full need against what nobody counts on."""
        if query.pages_reserved_at_once:
            return reserve(query)
        self._begin(query)
        if not len(query.running):
            self.ratio, self._preempted = self.start, False
            return AdmissionDecision(Verdict.ADMIT, "nothing else runs")
        supply = query.pages_free + query.pages_evictable - query.pages_promised
        growth = float((self._left(query.running) * self._ratios(query)).sum())
        own = float(self._left(query.candidate)[0])
        more = int(np.ceil((growth + own) / query.page_size))
        text = (
            f"needs {query.pages_needed} + {more} for growth at ratio {self.ratio:.3f},"
            f" {max(supply, 0)} of {query.pool_pages} pages left"
        )
        fits = query.pages_needed + more <= supply
        return AdmissionDecision(Verdict.ADMIT if fits else Verdict.WAIT, text)

    def _begin(self, query: AdmissionQuery) -> None:
        """Bring the ratio up to this step."""
        running, candidate = query.running, query.candidate
        if query.step != self._step:
            self._step = query.step
            self._admissions = int(running.admitted_order.max(initial=0))
            self._settle(query.step - 2)
        # It ran two steps ago and waits: it was preempted in the step between, or in this one.
        if candidate.preemptions[0] and candidate.last_step[0] == query.step - 2:
            self._preempted |= query.step - 1 > self._counted
        if self._preempted:
            self._preempted, self._counted = False, query.step - 1
            out, most = int(running.emitted.sum()), int(running.max_output.sum())
            expected = out + self.headroom_tokens * len(running)
            self.ratio = min(1.0, expected / (most + 1))

    def _settle(self, last_step: int) -> None:
        """Count the steps up to `last_step`."""
        while self._late and self._late[0][0] <= last_step:
            step, decoded, preempted = self._late.popleft()
            if decoded:
                self.ratio = max(self.ratio - self.decay, self.floor)
            self._preempted |= preempted and step > self._counted

    def _left(self, rows: RequestTable) -> NDArray[np.int64]:
        """Most tokens that each may still emit, clipped, with choices yet to start; int64."""
        left = np.clip(rows.max_output - rows.emitted, 0, self.clip_tokens)
        each: NDArray[np.int64] = left.astype(np.int64) * (1 + rows.forks)
        return each

    def _ratios(self, query: AdmissionQuery) -> NDArray[np.float64]:
        running = query.running
        sure = running.admitted_order > self._admissions
        sure |= self._ignore_ends(query)
        return np.where(sure, 1.0, self.ratio)

    def _ignore_ends(self, query: AdmissionQuery) -> NDArray[np.bool_]:
        """Which of the running ignore end tokens; each request is looked at once."""
        known, ids = self._endless, query.running.id.tolist()
        if len(known) > 2 * len(ids) + 64:
            self._endless = known = {one: known[one] for one in ids if one in known}
        for one in ids:
            if one not in known:
                known[one] = query.request(one).params.ignore_eos
        return np.array([known[one] for one in ids], np.bool_)
