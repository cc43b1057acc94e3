"""What a call of each hook costs, with 64 and 256 requests running and 1,000 waiting. Reported,
never judged: the machine may have other work."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.plugins.conformance.play import engine_for
from tests.plugins.conformance.subject import Subject
from tests.plugins.conformance.traffic import STEP_S, SteppedClock, Traffic, ask
from tests.plugins.conformance.watch import Watch

RUNNING = 64, 256
WAITING = 1000
STEPS = 60


@dataclass(frozen=True)
class Cost:
    """Of the calls at one hook, or of one method of the object built there: microseconds."""

    hook: str
    running: int
    calls: int
    mean_us: float
    p99_us: float


def costs(subject: Subject, running: int) -> Iterator[Cost]:
    """Of a run of STEPS steps in which memory is short now and then."""
    watch = Watch()
    rng = np.random.default_rng(0)
    asks = [
        ask(
            0, f"r{i}", int(rng.integers(8, 60)), int(rng.integers(20, 120)),
            shares=(f"p{i % 20}", 16), hidden=40, priority=i % 3, client=f"c{i % 8}",
            session=f"s{i % 20}", deadline_steps=i % 200 if i % 2 else None,
        )
        for i in range(running + WAITING)
    ]  # fmt: skip
    traffic = Traffic("cost", tuple(asks), pool=64 * running, seqs=running, budget=4096)
    clock = SteppedClock(STEP_S)
    plugin = watch.around(subject.make())
    options = {"checks": False, "clock": clock, "slice_tokens": 256}
    engine = watch.engine = engine_for(plugin, traffic, overlap=False, seed=7, **options)
    for one in asks:
        engine.submit(one.request(0.0))
    for step in range(STEPS):
        clock.start_step(step)
        engine.step()
    for hook, times in sorted(watch.times_ns.items()):
        times_us = np.array(times) / 1e3
        yield Cost(hook, running, len(times), times_us.mean(), np.percentile(times_us, 99))
