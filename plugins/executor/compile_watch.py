"""Kernels that are compiled after start-up: a request waits for each, so there should be none.

What start-up computes (plugins/executor/warm_up.py) meets every form of the project's kernels. One
that turns up later is logged when it comes, and a bench sums them up."""

import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel's form that Triton compiled, and how long that took."""

    kernel: str
    seconds: float


class CompileWatch:
    """Lists what Triton compiles in this process from now on, until it is closed. Forms that it
    finds in its cache on disk are not listed: they take milliseconds."""

    def __init__(self) -> None:
        from triton import knobs  # type: ignore[import-untyped]  # a CPU may do without

        self.compiled: list[Compilation] = []
        self._open = True
        self._knobs: Any = knobs.compilation
        self._before = self._knobs.listener
        self._knobs.listener = self

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **facts: Any) -> None:
        """For Triton, whose `knobs.compilation.listener` this is."""
        if self._open and not cache_hit:
            one = Compilation(str(src.name), times.total / 1e6)
            self.compiled.append(one)
            logger.warning(
                "kernel %s was compiled while requests waited (%.1f s)", one.kernel, one.seconds
            )
        if self._before is not None:
            self._before(src=src, times=times, cache_hit=cache_hit, **facts)

    def close(self) -> None:
        """List no more."""
        self._open = False
        if self._knobs.listener is self:
            self._knobs.listener = self._before
