"""Does a policy let a request wait without end while others come and go?

The engine is kept full: whenever a request ends another comes, so that there are never more than
about POPULATION in the system (or as many come as the engine can serve). Into this come requests
that a rule may dislike: a long prompt, a long output, low priority, no deadline, a client that was
served much, a prompt that nobody shares. None may see more than MOST_PASSED others end between its
arrival and its own end; under first come, first served it sees about 40.

A policy that states a bound on waiting, in seconds or steps, is given that long, again after each
step in which the request ran, before the count begins."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.engine_harness import Arrival
from tests.plugins.conformance.play import engine_for
from tests.plugins.conformance.rules import BrokenRuleError, NotCheckedError
from tests.plugins.conformance.subject import Subject
from tests.plugins.conformance.traffic import STEP_S, SteppedClock, Traffic
from tests.plugins.conformance.watch import Watch

POPULATION = 12
MOST_PASSED = 16 * POPULATION
STEPS_OF_BOUND = 60
"""In how many steps a stated bound goes by; simulated time is stretched to that."""
MOST_STEPS = 4000
STEPS_BEYOND_BOUND = 300
FULL_AT = 8
"""Step at which the disliked ones come: others run, and their prefix is cached."""


@dataclass(frozen=True)
class Probe:
    """Requests that may be disliked, and what keeps the engine full. filler: the i-th request to
    come, at a time. per_step: how many come each step, 0 = one for each that ended."""

    name: str
    traffic: Traffic
    filler: Callable[[int, float, float], Arrival]
    per_step: int = 0


def probes(subject: Subject) -> list[Probe]:
    """Those that fit the hooks of a policy; in the quick form the one that fits best."""
    found = []
    if subject.implements("decide_batch"):
        found.append(STREAM)
    if subject.implements("decide_order", "decide_admission", "decide_batch", "build_allocator"):
        found.append(QUEUE)
    if subject.implements("decide_admission", "decide_preemption"):
        found.append(PRESSURE)
    return found[:1] if subject.quick else found


def waits(subject: Subject, probe: Probe) -> dict[str, int]:
    """Others that ended while each disliked request waited beyond the policy's bound and had not
    ended; counting stops beyond MOST_PASSED."""
    return _Closed(subject, probe).run()


def does_not_starve(subject: Subject, probe: Probe) -> str:
    """Raises BrokenRuleError unless the bound holds or the policy declares why not; returns what
    was seen."""
    passed = waits(subject, probe)
    name, most = max(passed.items(), key=lambda item: item[1])
    if most <= MOST_PASSED:
        ended = "a request that it starves by design ended" if subject.starves else f"{name!r}"
        return f"{probe.name}: {ended} after {most} others"
    if subject.starves:
        return f"{probe.name}: starves {name!r} by design: {subject.starves}"
    bounds = (subject.starvation_bound_s, "s"), (subject.starvation_bound_steps, "steps")
    waited = " and ".join(f"{bound:g} {unit}" for bound, unit in bounds if bound)
    after = f" after {waited} of waiting" if waited else ""
    text = (
        f"{name!r} had not ended when {most} requests that came later had{after}, at most"
        f' {MOST_PASSED} may; by design? state `starves = "why"`, or `starvation_bound_s`'
    )
    raise BrokenRuleError("starvation", subject, subject.hooks[0], text)


class _Closed:
    """An engine that is kept full."""

    def __init__(self, subject: Subject, probe: Probe) -> None:
        self.bound_s, self.bound_steps = subject.starvation_bound_s, subject.starvation_bound_steps
        self.bounded = bool(self.bound_s or self.bound_steps)
        self.step_s = self.bound_s / STEPS_OF_BOUND if self.bound_s else STEP_S
        self.probe, self.clock = probe, SteppedClock(self.step_s)
        watch = Watch()
        options = {"checks": False, "clock": self.clock}
        plugin = watch.around(subject.make())
        self.engine = engine_for(plugin, probe.traffic, overlap=False, seed=7, **options)
        watch.engine = self.engine
        self.fillers = 0
        disliked = [one for one in probe.traffic.arrivals if one.name.startswith("a ")]
        self.since = {one.name: one.step for one in disliked}  # it waits, or began to
        self.passed = dict.fromkeys(self.since, 0)
        self.worst = dict.fromkeys(self.since, 0)

    def run(self) -> dict[str, int]:
        todo = sorted(self.probe.traffic.arrivals, key=lambda one: one.step)
        self._fill(POPULATION - len(todo))
        steps = STEPS_OF_BOUND + self.bound_steps + STEPS_BEYOND_BOUND
        for step in range(steps if self.bounded else MOST_STEPS):
            self.clock.start_step(step)
            while todo and todo[0].step <= step:
                self.engine.submit(todo.pop(0).request(self.clock.now()))
            ended = self._step(step)
            if not self.since or max(self.worst.values()) > MOST_PASSED:
                return self.worst
            self._fill(self.probe.per_step or ended)
        if self.bounded:
            return self.worst
        raise NotCheckedError(f"no end of it in {MOST_STEPS} steps")

    def _step(self, step: int) -> int:
        """One step; how many ended in it."""
        try:
            event = self.engine.step()
        except Exception as error:
            raise NotCheckedError(f"the run broke off: {error}") from error
        if event is None:
            return 0
        for record in event.finished:
            self.since.pop(record.request_id, None)
        if self.bounded:
            for name in {name for name, _, _ in event.record.rows} & self.since.keys():
                self.since[name], self.passed[name] = step, 0
        for name, since in self.since.items():
            waited = step - since
            if waited >= self.bound_steps and waited * self.step_s >= self.bound_s:
                self.passed[name] += len(event.finished)
                self.worst[name] = max(self.worst[name], self.passed[name])
        return len(event.finished)

    def _fill(self, count: int) -> None:
        now = self.clock.now()
        for _ in range(count):
            filler = self.probe.filler(self.fillers, now, self.step_s)
            self.engine.submit(filler.request(now))
            self.fillers += 1


def _arrival(name: str, prompt: int, output: int, step: int = 0, **fields: Any) -> Arrival:
    return Arrival(step, name, prompt, output, fields.pop("shares", None), {}, fields)


def _liked(index: int, now_s: float, step_s: float) -> Arrival:
    """Short, urgent, with a deadline, from one of four clients, with a prefix that many share."""
    return _arrival(
        f"f{index}", 56, 4,
        shares=("hot", 48),  # longer than the shortest that policies take notice of
        client=f"c{index % 4}",
        session=f"s{index % 4}",
        deadline_s=now_s + 20 * step_s,
    )  # fmt: skip


def _growing(index: int, now_s: float, step_s: float) -> Arrival:
    """Its output needs more pages than its prompt."""
    return _arrival(f"f{index}", 10, 12, client=f"c{index % 4}", deadline_s=now_s + 40 * step_s)


def _one_token(index: int, now_s: float, step_s: float) -> Arrival:
    """A prompt that fills most of a step's budget, and ends with it."""
    return _arrival(f"f{index}", 24, 1, deadline_s=now_s + 20 * step_s)


def _disliked(long_prompt: int, long_output: int) -> Iterator[Arrival]:
    for index in range(4):  # a client that gets much before its last request is looked at
        yield _arrival(f"heavy{index}", 24, 8, client="heavy")
    yield _arrival("a long prompt", long_prompt, 4, FULL_AT)
    yield _arrival("a long output", 10, long_output, FULL_AT)
    yield _arrival("a low priority", 10, 4, FULL_AT, priority=9)
    yield _arrival("a client served much", 10, 4, FULL_AT, client="heavy")
    yield _arrival("a plain request without deadline", 24, 4, FULL_AT)


QUEUE = Probe(
    "full queue",
    Traffic("full queue", tuple(_disliked(120, 40)), pool=1024, seqs=4, growth=0.25),
    _liked,
)
PRESSURE = Probe(
    "short of memory",
    Traffic("short of memory", tuple(_disliked(80, 50)), pool=192, seqs=8),
    _growing,
)
STREAM = Probe(
    "stream of prompts",
    Traffic(
        "stream of prompts",
        (_arrival("a long output", 8, 50),),
        pool=4096,
        seqs=64,
        budget=32,
        growth=0.25,
    ),
    _one_token,
    per_step=1,
)
