"""Mode simulate: a workload under a virtual clock, labelled with what its times are worth."""

from typing import Any

from core.config import require
from plugins.mode.bench import Bench
from plugins.mode.simulate_replicas import simulate_replicas
from plugins.shared.clocks import VirtualClock
from plugins.shared.session import Session


class Simulate:
    """Bench without a device: the same replay, records and summary. The summary's `simulated` holds
    what stood for the device and how far its times are from measured ones. bounds: with what its
    requests could have had at most (plugins/mode/bounds.py). regret: with several replicas, what
    each routing decision cost (plugins/mode/simulate_replicas.py)."""

    routes = True

    def __init__(self, bounds: bool = False, regret: bool = True) -> None:
        self.bounds = bounds
        self.regret = regret

    def run(self, session: Session) -> dict[str, Any]:
        """Run it; returns the summary. Raises ConfigError under a real clock."""
        virtual = isinstance(session.clock, VirtualClock)
        require(virtual, "clock", "virtual in mode=simulate", "real")
        if session.replicas > 1:
            require(not self.bounds, "mode.bounds", "false with several replicas", self.bounds)
            return simulate_replicas(session, self.regret)
        bench = Bench(warmup=False, lock="off")
        bench.name, bench.bounded = "simulate", self.bounds
        return bench.run(session)
