"""What `run.py` hands to a mode: the plugins, the settings, the folder, the workload."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from core.clock import Clock
from core.config import EngineConfig
from core.hooks import Hooks
from core.records import RequestRecord
from core.request import Request
from plugins.shared.measure import Measure, Slo
from plugins.shared.router import RouterSettings
from plugins.shared.run_info import RunInfo


class Records(Enum):
    """How much a run writes: every step, only requests, or only the summary."""

    full = "full"
    requests = "requests"
    summary = "summary"


class Workload(Protocol):
    """Produces the requests of a run (plugins/workload/).

    A method `describe() -> dict`, where there is one, says for the manifest what is replayed; it is
    called after `requests`."""

    name: str

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """All requests in order of arrival, perhaps built as they are asked for; of a closed loop
        those that wait for no other. Raises ConfigError for want of a tokenizer."""


@runtime_checkable
class ClosedLoop(Workload, Protocol):
    """A workload in which requests wait for others: turns of a dialogue, calls of an agent.

    closed_loop: False = not as it is configured: nothing follows. total_requests: of the whole run,
    known after `requests`."""

    closed_loop: bool
    total_requests: int

    def follow_up(self, record: RequestRecord) -> Sequence[Request]:
        """Requests that a request's end brings. Called once for each that ended, for whatever
        reason, in that order. They arrive at or after its end, record.finished_s."""


def closed_loop(workload: Workload) -> ClosedLoop | None:
    """The workload, if requests of this run wait for others."""
    return workload if isinstance(workload, ClosedLoop) and workload.closed_loop else None


def described(workload: Workload) -> dict[str, Any]:
    """Name of the workload, and what else it says of itself."""
    describe = getattr(workload, "describe", dict)
    return {"name": workload.name, **describe()}


@dataclass(slots=True)
class Session:
    """One run, composed and not yet started.

    run.manifest grows while parts are built (model, executor). folder: absolute, exists, empty but
    for config and manifest. device: "cpu", "cuda" or "cuda:N", already resolved from "auto".
    measure: what of the run counts. slo: what its requests are promised. hooks_again: builds new
    plugins from the same config, for another engine, here or (it pickles) in another process; None
    without a config. replicas: engines behind a router, as router says."""

    hooks: Hooks
    engine: EngineConfig
    clock: Clock
    run: RunInfo
    folder: Path
    device: str
    records: Records
    progress: bool
    workload: Workload
    measure: Measure = field(default_factory=Measure)
    slo: Slo = field(default_factory=Slo)
    hooks_again: Callable[[], Hooks] | None = None
    replicas: int = 1
    router: RouterSettings = field(default_factory=RouterSettings)


class Mode(Protocol):
    """What `mode=NAME` runs. One that can run session.replicas > 1 has a true attribute `routes`:
    every other is refused then."""

    def run(self, session: Session) -> dict[str, Any]:
        """Do the job; returns the run's summary (also for the console)."""
