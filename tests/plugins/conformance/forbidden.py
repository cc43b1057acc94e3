"""What no policy may call: clocks and sources of chance that a run does not own."""

import datetime
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

CLOCKS = (
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns"
    " thread_time thread_time_ns localtime gmtime sleep"
)
CHANCE = "random uniform randint choice choices sample shuffle randrange gauss normalvariate"
CHANCE += " expovariate betavariate triangular getrandbits randbytes seed"
LEGACY = "random rand randn randint random_sample choice shuffle permutation normal uniform poisson"
LEGACY += " exponential standard_normal binomial beta gamma seed bytes"
USE_CLOCK = "use query.now_s"
USE_RANDOM = "use query.random or a generator seeded from the run's seed"

OUR_OWN = __name__.rpartition(".")[0]
"""The kit itself may look at a clock."""

Report = Callable[[str], None]


class ForbiddenCallError(AssertionError):
    """A hook asked a clock or a source of chance of its own."""


class Forbidden:
    """While `watching` and inside `hook`, every forbidden call is told to `report` and raises."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._inside: int | None = None  # the thread that is in a hook

    @contextmanager
    def hook(self) -> Iterator[None]:
        """The policy has the word."""
        outer, self._inside = self._inside, threading.get_ident()
        try:
            yield
        finally:
            self._inside = outer

    @contextmanager
    def watching(self, package: str) -> Iterator[None]:
        """Replace the forbidden functions, also where a module of `package` or of plugins took them
        in by name."""
        swaps = self._swaps()
        by_id = {id(original): (original, fake) for _, _, original, fake in swaps}
        for module in _modules(package):
            for name, value in list(vars(module).items()):
                original, fake = by_id.get(id(value), (None, None))
                if original is value and fake is not None:
                    swaps.append((module, name, original, fake))
        for owner, name, _, fake in swaps:
            setattr(owner, name, fake)
        try:
            yield
        finally:
            for owner, name, original, _ in swaps:
                setattr(owner, name, original)

    def _swaps(self) -> list[tuple[Any, str, Any, Any]]:
        named = [(time, name, USE_CLOCK) for name in CLOCKS.split()]
        named += [(random, name, USE_RANDOM) for name in CHANCE.split()]
        named += [(np.random, name, USE_RANDOM) for name in LEGACY.split()]
        named += [(os, "urandom", USE_RANDOM), (secrets, "token_bytes", USE_RANDOM)]
        named += [(uuid, "uuid1", USE_RANDOM), (uuid, "uuid4", USE_RANDOM)]
        swaps = [
            (owner, name, getattr(owner, name), self._refuse(owner, name, instead))
            for owner, name, instead in named
        ]
        swaps.append((np.random, "default_rng", np.random.default_rng, self._seeded_rng()))
        swaps.append((datetime, "datetime", datetime.datetime, self._datetime()))
        return swaps

    def _refuse(self, owner: Any, name: str, instead: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self._inside == threading.get_ident():
                self._raise(f"{owner.__name__}.{name}() was called: {instead}")
            return original(*arguments, **options)

        return call

    def _seeded_rng(self) -> Callable[..., Any]:
        original = np.random.default_rng

        def default_rng(seed: Any = None) -> np.random.Generator:
            if seed is None and self._inside == threading.get_ident():
                self._raise(f"numpy.random.default_rng() was called without a seed: {USE_RANDOM}")
            return original(seed)

        return default_rng

    def _datetime(self) -> type:
        forbidden = self

        class Watched(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                if forbidden._inside == threading.get_ident():
                    forbidden._raise(f"datetime.now() was called: {USE_CLOCK}")
                return super().now(tz)

        return Watched

    def _raise(self, text: str) -> None:
        self._report(text)
        raise ForbiddenCallError(text)


def _modules(package: str) -> list[Any]:
    roots = ("plugins.", f"{package.partition('.')[0]}.")
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None
        and (name == package or name.startswith(roots))
        and not name.startswith(OUR_OWN)
    ]
