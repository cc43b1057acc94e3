"""For processes that talk to many clients or servers at once: the event loop, and open files."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

OPEN_FILES = 65536  # a connection is one; the usual soft limit of 1024 is for programs that select

T = TypeVar("T")


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on uvloop, or on asyncio's own loop where there is none (Windows)."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def allow_many_files() -> None:
    """As many as the system lets this process have, up to OPEN_FILES; never fewer than before."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
