"""An engine of a session with its outlet, for as long as a mode runs it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from core.build import build_engine
from core.engine import Engine
from plugins.mode.outlet import Outlet
from plugins.shared.clocks import RealClock
from plugins.shared.session import Records, Session

YOUNG_OBJECTS = 50_000
"""New objects between two collections: a step makes hundreds, and hardly any of them in a cycle."""


@contextmanager
def running(session: Session, contains_faults: bool = False) -> Iterator[tuple[Engine, Outlet]]:
    """Build it, and close it however the mode ends. In real time on a CUDA device sinks have a
    thread of their own; on a CPU nothing is waited for, and it would only compete with the
    engine's."""
    timed = isinstance(session.clock, RealClock)
    outlet = Outlet(threaded=timed and session.device.startswith("cuda"))
    engine = build_engine(
        session.hooks,
        session.engine,
        session.run.seed,
        session.clock,
        session.device,
        session.progress,
        [outlet],
        record_rows=session.records is Records.full,
        contains_faults=contains_faults,
    )
    # What start-up left stays to the end: no collection needs to go through it.
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield engine, outlet
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        engine.close()
