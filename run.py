"""Composes a config, builds plugins, runs one mode: python run.py [+policy=NAME] [key=value]."""

import sys
from functools import partial
from typing import Any

import hydra
from omegaconf import DictConfig

from conf.compose import make_clock, read_job
from conf.device import resolve_device
from conf.instantiate import build
from conf.jobs import command_line, guarded
from conf.manifest import manifest
from conf.overrides import ROOT
from conf.plugins import build_hooks, take_over_hooks
from conf.record import recorded
from core.config import require
from plugins.shared.run_info import RunInfo
from plugins.shared.session import Mode, Session


def run(config: DictConfig) -> dict[str, Any]:
    """Run one composed job and return its summary."""
    composed = read_job(config)
    settings = composed.settings
    device = resolve_device(settings.device)
    hooks = take_over_hooks(composed, device)
    policy = composed.policy + (" (oracle)" if hooks.oracle else "")
    facts = manifest(device, settings.seed, settings.plugin_path, composed.facts)
    session = Session(
        hooks=hooks,
        engine=settings.engine,
        clock=make_clock(settings.clock),
        run=RunInfo(
            composed.name, settings.seed, policy, hooks.in_charge(), composed.config, facts
        ),
        folder=composed.folder,
        device=device,
        records=settings.records,
        progress=settings.progress,
        workload=build("workload", composed.config["workload"]),
        measure=settings.measure,
        slo=settings.slo,
        hooks_again=partial(build_hooks, composed),
        replicas=settings.replicas,
        router=settings.router,
    )
    mode: Mode = build("mode", composed.config["mode"])
    routes = session.replicas == 1 or getattr(mode, "routes", False)
    require(routes, "replicas", "1 in this mode", session.replicas)
    with recorded(session):
        return mode.run(session)


@hydra.main(config_path=str(ROOT), config_name="config", version_base="1.3")
def job(config: DictConfig) -> Any:
    """What Hydra calls for a run, and for each job of a sweep."""
    return guarded(run, config)


if __name__ == "__main__":
    sys.exit(command_line(job))
