"""The requests of mode load on their way, and what came of them."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.records import RequestRecord
from core.request import Request
from plugins.mode.load_answer import Answer, record_of
from plugins.mode.load_client import LoadClient
from plugins.mode.outlet import Outlet
from plugins.mode.progress import EVERY_S, ProgressBar
from plugins.mode.samples import distribution
from plugins.shared.clocks import RealClock
from plugins.shared.metrics import completed


@dataclass(slots=True, eq=False)
class Replay:
    """The requests of a run on their way. records: of those that ended, in order of ending.
    late_s: from a request's arrival time to when the driver began to send it. errors: kind ->
    requests. counted_by: how tokens were counted -> completed requests. told: one that knows of
    cached tokens answered."""

    client: LoadClient
    path: str
    clock: RealClock
    outlet: Outlet
    records: list[RequestRecord] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    counted_by: Counter[str] = field(default_factory=Counter)
    told: bool = False
    num_events: int = 0
    _sizes: Counter[int] = field(default_factory=Counter)  # tokens of a chunk -> chunks

    async def run(self, calls: Sequence[tuple[Request, bytes]], bar: ProgressBar) -> None:
        """Send each at its time; returns when all have ended."""
        showing = asyncio.create_task(self._show(bar))
        try:
            async with asyncio.TaskGroup() as group:
                for number, (request, body) in enumerate(calls):
                    while (delay_s := request.arrival_s - self.clock.now()) > 0:
                        await asyncio.sleep(delay_s)
                    group.create_task(self._one(request, body))
                    if number % 64 == 63:
                        await asyncio.sleep(0)  # let a burst begin to send
        finally:
            showing.cancel()

    def hit_rate(self) -> float | None:
        """Cached prompt tokens / prompt tokens of completed requests, if the server counts them."""
        done = completed(self.records)
        prompts = sum(record.prompt_tokens for record in done)
        return sum(r.cached_tokens for r in done) / prompts if self.told and prompts else None

    def chunks(self) -> dict[str, Any]:
        """Of completed requests: chunks with tokens, the share that has several, the most tokens in
        one, and the gaps between the arrivals of a choice's chunks."""
        count = sum(number for size, number in self._sizes.items() if size)
        shared = sum(number for size, number in self._sizes.items() if size > 1)
        done = completed(self.records)
        times = [np.unique(choice.times_s) for record in done for choice in record.choices]
        gaps = np.concatenate([np.diff(one) for one in times]) if times else np.empty(0)
        return {
            "count": count,
            "several_tokens_share": shared / count if count else None,
            "max_tokens": max(self._sizes, default=None),
            "gap_s": distribution(gaps.tolist()),
        }

    async def _one(self, request: Request, body: bytes) -> None:
        answer = Answer(self.clock.now(), request.params.n)
        await self.client.ask(self.path, body, answer, self.clock, self._heard)
        record, counts, counted_by = record_of(request, answer)
        self.late_s.append(answer.sent_s - request.arrival_s)
        if answer.kind:
            self.errors[answer.kind] += 1
        if completed([record]):
            self.counted_by[counted_by] += 1
            self._sizes.update(counts)
            self.told |= answer.cached_tokens is not None
        self.records.append(record)
        self.outlet.request(record)

    def _heard(self) -> None:
        self.num_events += 1

    async def _show(self, bar: ProgressBar) -> None:
        begun_s = time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            rate = self.num_events / (time.monotonic() - begun_s)
            facts = f"{rate:,.0f} chunks/s"
            if failed := self.errors.total():
                facts += f" · {failed:,} failed"
            bar.show(len(self.records), facts)
