"""What `run.py` hands to a mode: the plugins, the settings, the folder, the workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from core.clock import Clock
from core.config import EngineConfig, Records
from core.hooks import Hooks
from core.records import RunInfo
from core.request import Request


class Workload(Protocol):
    """Produces the requests of a run (plugins/workload/)."""

    name: str

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """All requests in order of arrival. Raises ConfigError for want of a tokenizer."""


@dataclass(slots=True)
class Session:
    """One run, composed and not yet started.

    run.manifest grows while parts are built (model, executor). folder: absolute, exists, empty but
    for config and manifest. device: "cpu", "cuda" or "cuda:N", already resolved from "auto"."""

    hooks: Hooks
    engine: EngineConfig
    clock: Clock
    run: RunInfo
    folder: Path
    device: str
    records: Records
    progress: bool
    workload: Workload


class Mode(Protocol):
    """What `mode=NAME` runs."""

    def run(self, session: Session) -> dict[str, Any]:
        """Do the job; returns the run's summary (also for the console)."""
