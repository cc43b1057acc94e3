"""A replica's report on itself: the snapshot of its engine, between two steps."""

from dataclasses import dataclass, field

import numpy as np

from core.engine import Engine
from core.records import StepRecord
from core.table import State
from plugins.shared.routing import DeviceFacts, ReplicaSnapshot

MEMORY_STEPS = 16.0  # steps over which step_s is averaged, with weights that fall by a factor


@dataclass(slots=True)
class Reporter:
    """Makes the numbered snapshots of one incarnation, on its engine's thread.

    received: the highest ticket number that came in; foreign: unfinished requests that came
    without a ticket. Both are the caller's to keep."""

    replica: str
    received: int = 0
    foreign: int = 0
    number: int = 0
    _step_s: float | None = field(default=None, init=False)

    def took(self, record: StepRecord) -> None:
        """A step is over."""
        step_s = (record.end_s - record.start_s) / record.steps
        if self._step_s is None:
            self._step_s = step_s
        else:
            weight = min(record.steps / MEMORY_STEPS, 1.0)
            self._step_s += weight * (step_s - self._step_s)

    def snapshot(self, engine: Engine, device: DeviceFacts | None = None) -> ReplicaSnapshot:
        """How the engine stands. O(live requests)."""
        self.number += 1
        state, memory = engine.state, engine.state.memory
        table, ledger, page_size = state.table, memory.ledger, memory.page_size
        columns = table.columns
        running = state.running
        waiting = np.flatnonzero(columns["state"] == State.WAITING)
        live = table.view(np.concatenate([running, waiting]))
        known = live.known + live.in_flight
        expected = known + np.ceil(live.predicted_remaining).astype(np.int64)
        promised = np.maximum(-(-expected // page_size) - live.pages_held, 0)
        return ReplicaSnapshot(
            replica=self.replica,
            number=self.number,
            received=self.received,
            time_s=state.now_s,
            page_size=page_size,
            pool_pages=ledger.num_pages,
            pages_free=ledger.num_free,
            pages_evictable=memory.cache.num_evictable,
            pages_promised=int(promised.sum()),
            running=len(running),
            waiting=len(waiting),
            # one token a decoding sequence is no prefill work
            prompt_tokens=int(live.remaining[live.remaining > 1].sum()),
            kv_tokens=int(live.computed.sum()),
            foreign=self.foreign,
            step_s=self._step_s,
            device=device or DeviceFacts(),
        )
