"""Mode serve with more than one replica: this process routes, engines run as Ray actors."""

import select
from contextlib import nullcontext
from typing import Any

from core.errors import ConfigError
from core.queries import LengthPredictorQuery
from core.records import RequestRecord
from core.request import FinishReason
from plugins.mode.device_lock import lock_of
from plugins.mode.outlet import Receivers
from plugins.mode.replicas.fleet import Came, RayFleet, RaySettings
from plugins.mode.replicas.loop import RouterLoop
from plugins.mode.replicas.plan import plan_of
from plugins.mode.replicas.routes import Routes
from plugins.mode.replicas.traffic import Traffic
from plugins.mode.run_facts import head, summary_of_hooks
from plugins.mode.simulate_replicas import lines_of, sinks_of
from plugins.mode.step_totals import merged
from plugins.mode.summary import summarise
from plugins.shared.clocks import RealClock
from plugins.shared.prefix_view import PrefixView
from plugins.shared.replica_registry import Registry
from plugins.shared.router import HOOK, Router
from plugins.shared.server_protocol import Server, ServerQuery
from plugins.shared.session import Session


def serve_replicas(session: Session, ray: RaySettings, warmup: bool, lock: str) -> dict[str, Any]:
    """Serve until the server drains; returns the summary. The first replica that is ready starts
    it; others join as they come. Raises ConfigError if the first to answer could not be built."""
    plugin = session.hooks.registered[session.run.hooks[HOOK]].plugin
    if getattr(plugin, "oracle", False):
        name = session.run.hooks[HOOK]
        raise ConfigError(f"router must be none that knows the future in mode serve, got {name}")
    plan = plan_of(session, warmup, session.router.snapshot_interval_s, lock)
    on_cpu = plan.device == "cpu"
    with lock_of(session, lock) if on_cpu else nullcontext():
        fleet = RayFleet(plan, session.replicas, ray)
        try:
            return _serve(session, fleet)
        finally:
            fleet.close()


def _serve(session: Session, fleet: RayFleet) -> dict[str, Any]:
    hooks, folder = session.hooks, str(session.folder)
    early, facts = _first(session, fleet)
    with sinks_of(session) as sinks, lines_of(session) as lines:
        hooks.notify("on_run_start", session.run)
        assert isinstance(session.clock, RealClock), "checked by mode serve"
        session.clock.restart()
        server: Server = hooks.build("build_server", ServerQuery(facts, folder))
        try:
            registry = Registry(session.router.suspect_after_s, session.router.dead_after_s)
            routes = Routes(registry, lines)
            loop = _loop(session, fleet, server, sinks, routes)
            loop.run(early)
        finally:
            server.close()
        summary = _summary(session, loop, routes)
        hooks.notify("on_run_end", summary)
        for sink in sinks.sinks:
            sink.close(session.run, summary)
    return summary


def _first(session: Session, fleet: RayFleet) -> tuple[list[Came], dict[str, Any]]:
    """What was heard until a replica was ready, and what a server needs to know of it."""
    early: list[Came] = []
    while True:
        select.select([fleet.descriptor], [], [])
        early += fleet.came()
        for came in early:
            if came.born is not None:
                session.run.manifest["executor"] = came.born.executor
                return early, fleet.facts(came.replica)
            if came.lost:
                raise ConfigError(f"replica {came.replica} could not start: {came.lost}")


def _loop(
    session: Session, fleet: RayFleet, server: Server, sinks: Receivers, routes: Routes
) -> RouterLoop:
    settings, seed = session.router, session.run.seed

    def ended(record: RequestRecord) -> None:
        sinks.take([record])
        sinks.check()

    view = PrefixView(settings.block_tokens)
    router = Router(session.hooks, routes.registry, view, seed, routes.decided)
    predictor = session.hooks.build("build_length_predictor", LengthPredictorQuery(seed))
    traffic = Traffic(fleet, server, router, predictor, session.clock, seed, ended)
    return RouterLoop(fleet, server, router, traffic, settings.snapshot_interval_s)


def _summary(session: Session, loop: RouterLoop, routes: Routes) -> dict[str, Any]:
    """That of mode serve; figures of steps are those of all replicas together, means and pools of
    one of them."""
    recent, finished = list(loop.traffic.recent), loop.traffic.finished
    summary = summarise(recent, merged(loop.steps))
    counts = {reason.value: finished[reason.value] for reason in FinishReason}
    summary["requests"] |= {
        "accepted": finished.total(),
        "completed": counts["stop"] + counts["length"],
        "finish_reasons": counts,
    }
    restarts = sum(loop.births.values()) - len(loop.births)
    return {
        **head(session, "serve", "clients"),
        "device": session.device,
        "measured_requests": len(recent),
        **summary,
        "replicas": {
            "count": session.replicas,
            "router": session.run.hooks[HOOK],
            "restarts": restarts,
            "failovers": loop.traffic.failovers,
            **routes.summary(),
        },
        "hooks": session.run.hooks,
        "plugins": [one for one in summary_of_hooks(session.hooks) if one["asked"]],
    }
