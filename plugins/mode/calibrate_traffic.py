"""The session's workload through the engine: what its steps tell beside a grid of single ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.engine import Engine
from core.records import RequestRecord, StepRecord
from plugins.mode.outlet import Outlet
from plugins.mode.pending import Pending
from plugins.shared.run_info import RunInfo
from plugins.shared.session import Session

Float = NDArray[np.float64]
PARTS = ("plan", "pack", "launch", "collect", "commit", "observers")
STRETCH = 16  # steps whose time together is compared
COUNTS = ("num_rows", "prefill_tokens", "decode_tokens", "kv_tokens", "attended", "graph_tokens")
STARTED = ("admitted", "resumed")  # kinds of choices
OLD_NAMES = {"graph_rows": "graph_tokens"}
TIMES = ("start_s", "launched_s", "end_s")


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """Steps of a run that launched something, one after the other; float64 [n] each. num_rows to
    graph_tokens, start_s to end_s: of StepRecord; num_new: sequences that its plan admitted; plan
    to observers: its host_us, in seconds; next_s: when the step after it began, launching or not,
    NaN = there was none."""

    num_rows: Float
    prefill_tokens: Float
    decode_tokens: Float
    kv_tokens: Float
    attended: Float
    graph_tokens: Float
    num_new: Float
    start_s: Float
    launched_s: Float
    end_s: Float
    plan: Float
    pack: Float
    launch: Float
    collect: Float
    commit: Float
    observers: Float
    next_s: Float

    def __len__(self) -> int:
        return len(self.num_rows)

    @property
    def num_tokens(self) -> Float:
        """Computed tokens."""
        return self.prefill_tokens + self.decode_tokens

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        np.savez_compressed(path, **columns)


def ran_of(records: Sequence[StepRecord]) -> Ran:
    """The columns of a run's records, in their order."""
    starts_s = [record.start_s for record in records]
    columns: dict[str, list[float]] = {name: [] for name in Ran.__slots__}
    for record, next_s in zip(records, [*starts_s[1:], np.nan], strict=True):
        if not record.num_rows:
            continue
        for name in (*COUNTS, *TIMES):
            columns[name].append(float(getattr(record, name)))
        for name in PARTS:
            columns[name].append(record.host_us.get(name, 0.0) / 1e6)
        columns["num_new"].append(float(sum(one.kind in STARTED for one in record.choices)))
        columns["next_s"].append(next_s)
    return Ran(**{name: np.array(values, np.float64) for name, values in columns.items()})


def load_ran(path: Path) -> Ran:
    """Read what `Ran.save` wrote. Files of before graph_tokens counted other launches, too, have
    graph_rows in its place; of before num_new, rows with more than one token count, of which nearly
    all are new in such a run."""
    with np.load(path) as arrays:
        found = {OLD_NAMES.get(name, name): arrays[name] for name in arrays}
    new = found["num_rows"] - found["decode_tokens"]
    return Ran(**{"num_new": new} | found)


def serve(session: Session, engine: Engine, outlet: Outlet) -> list[StepRecord]:
    """Serve the workload's requests at their arrival times, as mode=bench does; the records of its
    steps. A thread of sinks, where a bench has one, wakes up at every step here, too."""
    executor, clock = engine.executor, session.clock
    pending = Pending(
        session.workload.requests(executor.tokenizer, executor.vocab_size, session.run.seed)
    )
    records: list[StepRecord] = []
    began_s = clock.now()
    outlet.open([Nowhere()])
    try:
        while pending or engine.has_work:
            while pending.next_s <= clock.now() - began_s:
                request = pending.pop()
                engine.submit(replace(request, arrival_s=request.arrival_s + began_s))
            event = engine.step()
            if event is not None:
                records.append(event.record)
            if pending and (engine.stalled or not engine.has_work):
                clock.wait_until(began_s + pending.next_s)
    except BaseException as error:
        outlet.fail(error)
        raise
    outlet.close(session.run, {})
    return records


class Nowhere:
    """A sink that keeps nothing."""

    def step(self, record: StepRecord) -> None:
        """Nothing."""

    def request(self, record: RequestRecord) -> None:
        """Nothing."""

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Nothing."""
