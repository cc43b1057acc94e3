"""What policies are tried on: requests by step, each kind of traffic with its own difficulty.

Lengths are forced and, where a client would allow more, hidden from policies. Under end tokens the
same requests end where the script says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from core.clock import Clock
from tests.engine_harness import Arrival

STEP_S = 0.02
"""Simulated seconds from one step to the next, launched ahead or not."""

END_TOKENS = tuple(range(24))


@dataclass(frozen=True)
class Traffic:
    """Requests and aborts by step, and the engine they meet. pool: tokens; growth: growth_share of
    the default admission (0: prompts alone, so that memory runs short)."""

    name: str
    arrivals: tuple[Arrival, ...]
    aborts: dict[str, int] = field(default_factory=dict)
    pool: int = 2048
    seqs: int = 8
    budget: int = 64
    growth: float = 0.0
    page_size: int = 16

    def until_end_tokens(self) -> "Traffic":
        """The same requests with lengths that only the script knows."""
        asks = []
        for one in self.arrivals:
            fields = {name: value for name, value in one.fields.items() if name != "forced_output"}
            params = one.params | {"ignore_eos": False}
            asks.append(replace(one, fields=fields, params=params))
        return replace(self, name=f"{self.name}, end tokens", arrivals=tuple(asks), aborts={})

    @property
    def most_steps(self) -> int:
        """Steps within which even one token a step is enough."""
        tokens = sum(
            one.prompt_tokens + one.output_tokens * one.params.get("n", 1) for one in self.arrivals
        )
        return 300 + tokens


class SteppedClock(Clock):
    """Simulated time that says the same at the start of a step with and without overlap: only
    `start_step` leads on to the next step. Within one a launch takes its time."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self.step_s = step_s
        self._now = 0.0

    def restart(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def start_step(self, step: int) -> None:
        """Be at the start of a step, by number."""
        self._now = max(self._now, step * self.step_s)


def ask(step: int, name: str, prompt: int, output: int, **more) -> Arrival:
    """An arrival with a forced length. shares: (other name, tokens); n: choices; hidden: how many
    more tokens the client allows; deadline_steps: from now; everything else: fields of Request."""
    params = {"n": more.pop("n", 1), "max_tokens": output + more.pop("hidden", 0)}
    shares = more.pop("shares", None)
    if (steps := more.pop("deadline_steps", None)) is not None:
        more["deadline_s"] = (step + steps) * STEP_S
    return Arrival(step, name, prompt, output, shares, params, {"forced_output": output} | more)


def mixed(seed: int) -> Traffic:
    """Something of everything, small."""
    rng = np.random.default_rng(seed)
    asks = []
    for index, step in enumerate([0, 0, 0, 0, 0, 1, 2, 2, 4, 6, 9, 12]):
        asks.append(
            ask(
                step,
                f"m{index}",
                int(rng.integers(1, 70)),
                int(rng.integers(1, 24)),
                shares=("m0", 32) if index % 3 == 0 else None,
                n=2 if index % 5 == 2 else 1,
                hidden=int(rng.integers(0, 30)),
                priority=int(rng.integers(0, 3)),
                client=f"c{index % 3}",
                session=f"s{index % 4}",
                deadline_steps=int(rng.integers(5, 60)) if index % 2 else None,
            )
        )
    aborts = {"m4": 3, "m7": 8}
    return Traffic("mixed", tuple(asks), aborts, pool=208, seqs=5, budget=48)


def long_queue(seed: int) -> Traffic:
    """Everyone comes at once, memory is ample, slots are few."""
    asks = [
        ask(0, f"q{i}", prompt, output, hidden=20, session=f"s{i % 7}")
        for i, prompt, output in _lengths(seed, 60, 60, 12)
    ]
    return Traffic("long queue", tuple(asks), seqs=4)


def memory_pressure(seed: int) -> Traffic:
    """Prompts fit, outputs do not."""
    asks = [
        ask(i // 4, f"p{i}", prompt, output + 8, hidden=i % 40)
        for i, prompt, output in _lengths(seed, 24, 80, 40)
    ]
    return Traffic("memory pressure", tuple(asks), pool=256)


def shared_prefixes(seed: int) -> Traffic:
    """Groups with a common prefix, some in namespaces or kept out of the cache, in a pool that
    cannot keep them all."""
    asks = [
        ask(
            2 * i // 3,
            f"s{i}",
            50 + prompt,
            output,
            shares=(f"group{i % 4}", 48),
            namespace="tenant" if i % 8 == 4 else "",
            cache=i % 9 != 5,
            session=f"group{i % 4}",
            hidden=10,
        )
        for i, prompt, output in _lengths(seed, 36, 40, 10)
    ]
    return Traffic("shared prefixes", tuple(asks), pool=384, seqs=6, page_size=4)


def many_choices(seed: int) -> Traffic:
    """Requests for several choices that share a prompt, with too little memory for all."""
    asks = [
        ask(i, f"n{i}", prompt, output, n=1 + i % 4, hidden=8)
        for i, prompt, output in _lengths(seed, 14, 60, 20)
    ]
    return Traffic("several choices", tuple(asks), pool=320, seqs=6)


def labels(seed: int) -> Traffic:
    """Priorities, deadlines and clients of which one asks for most."""
    rng = np.random.default_rng(seed)
    asks = [
        ask(
            int(rng.integers(0, 40)),
            f"l{i}",
            prompt,
            output,
            priority=int(rng.integers(-1, 4)),
            client="heavy" if i % 2 else f"c{i % 5}",
            session=f"s{i % 3}",
            deadline_steps=int(rng.integers(4, 100)) if i % 3 else None,
            hidden=int(rng.integers(0, 60)),
        )
        for i, prompt, output in _lengths(seed, 36, 60, 20)
    ]
    return Traffic("priorities, deadlines, clients", tuple(asks), pool=288, seqs=5)


def aborts(seed: int) -> Traffic:
    """Clients that go away while they wait, compute their prompt, run or after they ended."""
    rng = np.random.default_rng(seed)
    asks = [
        ask(i // 2, f"a{i}", prompt, output, n=1 + i % 2, hidden=10)
        for i, prompt, output in _lengths(seed, 30, 100, 25)
    ]
    gone = {one.name: one.step + int(rng.integers(0, 25)) for one in asks[::2]}
    return Traffic("aborts", tuple(asks), gone, pool=320, seqs=6, budget=32, page_size=1)


def long_prompts(seed: int) -> Traffic:
    """Prompts of many steps, kept out of the cache, between short ones, under a small budget."""
    asks = [
        ask(i, f"b{i}", 4 * prompt if i % 3 == 0 else prompt // 4 + 1, output, cache=i % 3 != 0)
        for i, prompt, output in _lengths(seed, 20, 90, 10)
    ]
    return Traffic("long prompts", tuple(asks), pool=640, budget=16, growth=0.25)


def roomy(seed: int) -> Traffic:
    """Few at a time, nothing is short: a policy must not stand in the way."""
    asks = [
        ask(3 * i, f"r{i}", prompt, output, hidden=5)
        for i, prompt, output in _lengths(seed, 12, 50, 15)
    ]
    return Traffic("nothing is short", tuple(asks))


KINDS: tuple[Callable[[int], Traffic], ...] = (
    mixed,
    long_queue,
    memory_pressure,
    shared_prefixes,
    many_choices,
    labels,
    aborts,
    long_prompts,
    roomy,
)


def _lengths(seed: int, count: int, prompt: int, output: int) -> Iterator[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    for index in range(count):
        yield index, int(rng.integers(1, prompt + 1)), int(rng.integers(1, output + 1))
