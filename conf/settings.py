"""Typed settings of a run outside the engine and the plugins: the config's top-level scalars."""

import re
from dataclasses import dataclass, field
from enum import Enum

from core.config import EngineConfig, require
from plugins.shared.measure import Measure, Slo
from plugins.shared.router import RouterSettings
from plugins.shared.session import Records


class ClockKind(Enum):
    """Wall-clock time, or simulated time that only the executor moves."""

    real = "real"
    virtual = "virtual"


@dataclass
class RunConfig:
    """Settings of a run outside the engine and the plugins.

    seed: of random weights, workload, policies and sampling. name: label of the run, None = its
    policies and seed. device: auto, cpu, cuda or cuda:N. clock: set by the choice of executor.
    records: how much is written. progress: bars on long work. plugin_path: folder of a user's own
    plugins, its conf/ beside them. replicas: engines that a router sends requests to. measure: the
    requests that enter no figure. slo: what requests are promised, for the share that got it.
    """

    seed: int = 0
    name: str | None = None
    device: str = "auto"
    clock: ClockKind = ClockKind.real
    records: Records = Records.full
    progress: bool = True
    plugin_path: str | None = None
    replicas: int = 1
    engine: EngineConfig = field(default_factory=EngineConfig)
    measure: Measure = field(default_factory=Measure)
    slo: Slo = field(default_factory=Slo)
    router: RouterSettings = field(default_factory=RouterSettings)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", "in [0, 2**63)", self.seed)
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        require(known, "device", "auto, cpu, cuda or cuda:N", self.device)
        require(self.replicas >= 1, "replicas", ">= 1", self.replicas)
        require(
            self.name is None or bool(self.name.strip()), "name", "null or not empty", self.name
        )
