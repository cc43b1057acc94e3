"""What a replica's process needs to build its engine: a session without what stays behind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.config import EngineConfig
from core.errors import ConfigError
from core.hooks import Hooks
from plugins.mode.device_lock import num_devices
from plugins.shared.clocks import RealClock
from plugins.shared.run_info import RunInfo
from plugins.shared.session import Records, Session, Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """Parts of a Session, and arguments of mode serve. device: "cpu" or "cuda": the one that the
    process sees. lock: as mode.lock, "off" where the router's process holds it. num_devices: that
    compute together in an engine."""

    hooks: Callable[[], Hooks]
    engine: EngineConfig
    run: RunInfo
    folder: Path
    device: str
    records: Records
    workload: Workload
    warmup: bool
    report_s: float
    lock: str
    num_devices: int

    def session(self) -> Session:
        """A session with plugins of its own."""
        return Session(
            hooks=self.hooks(),
            engine=self.engine,
            clock=RealClock(),
            run=self.run,
            folder=self.folder,
            device=self.device,
            records=self.records,
            progress=False,
            workload=self.workload,
        )


def plan_of(session: Session, warmup: bool, report_s: float, lock: str) -> Plan:
    """Raises ConfigError for a session that cannot be built twice."""
    if session.hooks_again is None:
        raise ConfigError("replicas must be 1 for plugins that no config describes")
    device = session.device.partition(":")[0]
    return Plan(
        hooks=session.hooks_again,
        engine=session.engine,
        run=session.run,
        folder=session.folder,
        device=device,
        records=session.records,
        workload=session.workload,
        warmup=warmup,
        report_s=report_s,
        lock="off" if device == "cpu" else lock,
        num_devices=num_devices(session),
    )
