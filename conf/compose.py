"""From Hydra's composed config to a Job: typed settings, and plain nodes named as plugins."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from conf.auto import choose_by_device
from conf.folders import policy_label, register_resolvers
from conf.schema import check_top_level, read_settings, register_schema
from conf.settings import ClockKind, RunConfig
from core.clock import Clock
from core.errors import ConfigError
from plugins.shared.clocks import RealClock, VirtualClock

PLUGIN_GROUPS = ("model", "batching", "allocator", "cache", "attention", "executor", "server")
Nodes = dict[str, tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Job:
    """One composed run.

    config: resolved, plain values. choices: group -> chosen name. facts: overrides and the place in
    a sweep, for the manifest. folder: absolute.
    """

    settings: RunConfig
    config: dict[str, Any]
    choices: dict[str, Any]
    facts: dict[str, Any]
    folder: Path

    @property
    def policy(self) -> str:
        """The flat label of its `+policy=` plugins."""
        return policy_label(self.config)

    @property
    def name(self) -> str:
        """`name`, or policy and seed."""
        return self.settings.name or f"{self.policy}-s{self.settings.seed}"


def register() -> None:
    """Make schema and resolvers known to Hydra and OmegaConf; before composing."""
    register_schema()
    register_resolvers()


def read_job(config: DictConfig) -> Job:
    """The job that Hydra is running. Raises ConfigError for a missing, unknown or bad key."""
    hydra = HydraConfig.get()
    facts: dict[str, Any] = {"overrides": list(hydra.overrides.task)}
    if hydra.mode == RunMode.MULTIRUN:
        facts["sweep"] = {"folder": Path(hydra.sweep.dir).name, "position": hydra.job.num}
    return make_job(config, dict(hydra.runtime.choices), facts, Path(hydra.runtime.output_dir))


def make_job(
    config: DictConfig, choices: dict[str, Any], facts: dict[str, Any], folder: Path
) -> Job:
    """As `read_job`, with what Hydra knows given."""
    missing = _missing(OmegaConf.to_container(config, resolve=False))
    if missing:
        mode = choices.get("mode")
        wanted = " ".join(f"{key}=..." for key in missing)
        raise ConfigError(f"{', '.join(missing)} must be given: add {wanted} (mode={mode})")
    check_top_level(config)
    settings = read_settings(config)
    config = choose_by_device(config)
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict), "the root of a config is a mapping"
    return Job(settings, {str(key): plain[key] for key in plain}, choices, facts, folder)


def default_nodes(job: Job) -> Nodes:
    """Plugin name -> (where it stands, its node), of defaults_behind, sinks, and groups but empty
    ones, which are asked first: the executor knows its step times, a batching may gate admission.

    One that `plugins` names again is left out: the same plugin, asked first, is behind itself.
    Raises ConfigError for two of one name.
    """
    nodes: Nodes = {}
    for collection in ("defaults_behind", "sinks"):
        _add(nodes, _collection(job, collection))
    for group in PLUGIN_GROUPS:
        if job.config[group]:  # `none` of an executor that needs no such part
            _add(nodes, {_group_name(job, group): (group, job.config[group])})
    again = {
        name
        for name, (_, node) in plugin_nodes(job).items()
        if name in nodes and nodes[name][1].get("_target_") == node.get("_target_")
    }
    return {name: node for name, node in nodes.items() if name not in again}


def plugin_nodes(job: Job) -> Nodes:
    """Plugin name -> (where it stands, its node), of `plugins`, in the order of the config."""
    return _collection(job, "plugins")


def make_clock(kind: ClockKind) -> Clock:
    """The clock of a run."""
    return VirtualClock() if kind is ClockKind.virtual else RealClock()


def _missing(value: Any, path: str = "") -> list[str]:
    """Paths of values still to be given; interpolations of them are not repeated."""
    if isinstance(value, dict):
        return [
            key
            for name, inner in value.items()
            for key in _missing(inner, f"{path}.{name}" if path else str(name))
        ]
    return [path] if value == MISSING else []


def _collection(job: Job, collection: str) -> Nodes:
    given = job.config.get(collection) or {}
    nodes = {name: node for name, node in given.items() if node is not None}  # null leaves one out
    for name, node in nodes.items():
        if not isinstance(node, Mapping):
            raise ConfigError(
                f"{collection}.{name} must be a mapping with a _target_, got {node!r}"
            )
    return {str(name): (f"{collection}.{name}", node) for name, node in nodes.items()}


def _add(nodes: Nodes, more: Nodes) -> None:
    for name, (path, node) in more.items():
        if name in nodes:
            raise ConfigError(f"{nodes[name][0]} and {path} name two plugins {name!r}; rename one")
        nodes[name] = (path, node)


def _group_name(job: Job, group: str) -> str:
    """The chosen file's name; a backend goes by its own, whichever file it came from."""
    node = job.config[group]
    name = node.get("name") if group == "attention" else None
    return str(name or job.choices.get(group) or group)
