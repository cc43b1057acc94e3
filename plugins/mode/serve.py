"""Mode serve: the engine behind a server, until that is told to stop."""

from typing import Any

from core.config import require
from core.engine import Engine
from core.errors import ConfigError
from core.request import FinishReason
from plugins.mode.bench import Compiled
from plugins.mode.device_lock import check_lock, lock_of
from plugins.mode.facts import facts
from plugins.mode.outlet import Outlet
from plugins.mode.replicas.fleet import RaySettings
from plugins.mode.replicas.serve import serve_replicas
from plugins.mode.run_facts import head, summary_of_hooks
from plugins.mode.running import running
from plugins.mode.serve_loop import ServeLoop
from plugins.mode.summary import summarise
from plugins.mode.warm_up import warm_up
from plugins.shared.clocks import RealClock
from plugins.shared.run_info import SinkQuery
from plugins.shared.server_protocol import Server, ServerQuery
from plugins.shared.session import Session


class Serve:
    """Serves what comes in through the plugin behind `build_server`.

    warmup, lock: as in mode bench. report_s: how often the server hears how the engine is. ray:
    where replicas > 1 run (plugins.mode.replicas.fleet.RaySettings)."""

    routes = True

    def __init__(
        self,
        warmup: bool = True,
        report_s: float = 0.25,
        lock: str = "fail",
        ray: dict[str, Any] | None = None,
    ) -> None:
        require(report_s > 0, "mode.report_s", "> 0", report_s)
        check_lock(lock)
        self.warmup = warmup
        self.report_s = report_s
        self.lock = lock
        self.ray = RaySettings(**(ray or {}))

    def run(self, session: Session) -> dict[str, Any]:
        """Serve until the server drains; returns the summary.

        A fault stops the engine, not the server: it tells clients why until it is stopped, and then
        the fault is raised. Raises ConfigError under a simulated clock."""
        if not isinstance(session.clock, RealClock):
            raise ConfigError("mode serve needs clock=real: clients live in real time")
        if session.replicas > 1:
            return serve_replicas(session, self.ray, self.warmup, self.lock)
        with (
            lock_of(session, self.lock),
            running(session, contains_faults=True) as (engine, outlet),
        ):
            session.run.manifest["executor"] = engine.executor.describe()
            if self.warmup:
                warm_up(engine)
            return self._serve(session, engine, outlet)

    def _serve(self, session: Session, engine: Engine, outlet: Outlet) -> dict[str, Any]:
        folder, hooks, compiled = str(session.folder), session.hooks, Compiled(engine)
        outlet.open(hooks.build_all("build_sink", SinkQuery(session.run, folder)))
        server: Server | None = None
        try:
            hooks.notify("on_run_start", session.run)
            assert isinstance(session.clock, RealClock), "checked by run"
            session.clock.restart()
            server = hooks.build("build_server", ServerQuery(facts(session, engine), folder))
            loop = ServeLoop(engine, server, self.report_s)
            loop.run()
            server.close()
            if loop.fault is not None:
                raise loop.fault
            summary = self._summary(session, loop) | {"compiled": compiled.summary()}
            hooks.notify("on_run_end", summary)
        except BaseException as error:
            if server is not None:
                server.close()
            outlet.fail(error)
            raise
        outlet.close(session.run, summary)
        return summary

    def _summary(self, session: Session, loop: ServeLoop) -> dict[str, Any]:
        """That of mode bench. Figures of requests, but for their counts, are over the last ones."""
        recent = list(loop.recent)
        summary = summarise(recent, loop.totals)
        counts = {reason.value: loop.finished[reason.value] for reason in FinishReason}
        summary["requests"] |= {
            "accepted": loop.finished.total(),
            "completed": counts["stop"] + counts["length"],
            "finish_reasons": counts,
        }
        return {
            **head(session, "serve", "clients"),
            "device": session.device,
            "measured_requests": len(recent),
            **summary,
            "hooks": session.run.hooks,
            "plugins": summary_of_hooks(session.hooks),
        }
