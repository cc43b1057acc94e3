"""The typed part of the config: RunConfig of conf/settings.py, as a node open to further keys."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from conf.settings import RunConfig
from core.config import EngineConfig
from core.errors import ConfigError
from plugins.shared.measure import Measure, Slo
from plugins.shared.router import RouterSettings

GROUPS = (
    "model",
    "workload",
    "batching",
    "allocator",
    "cache",
    "attention",
    "executor",
    "ops",
    "server",
    "mode",
)
COLLECTIONS = ("defaults_behind", "sinks", "plugins")
SETTINGS = tuple(field.name for field in fields(RunConfig))
NESTED: dict[str, Any] = {
    "engine": EngineConfig,
    "measure": Measure,
    "slo": Slo,
    "router": RouterSettings,
}


def register_schema() -> None:
    """Store `schema` for the defaults list of config.yaml. Repeating it changes nothing.

    The root stays a plain node, so that a mode can declare keys of its own; each value of RunConfig
    keeps its type and refuses others while the config is composed.
    """
    typed = OmegaConf.structured(RunConfig)
    ConfigStore.instance().store(
        "schema", OmegaConf.create({key: typed._get_node(key) for key in typed})
    )


def read_settings(config: DictConfig) -> RunConfig:
    """The settings as dataclasses. Raises ConfigError for an unknown key or a bad value."""
    values: dict[str, Any] = {key: config[key] for key in SETTINGS if key not in NESTED}
    for name, kind in NESTED.items():
        names = [one.name for one in fields(kind)]
        for key in config[name]:
            if key not in names:
                raise ConfigError(unknown_key(str(key), names, f"{name}."))
        values[name] = kind(**{key: config[name][key] for key in names})
    return RunConfig(**values)


def check_top_level(config: DictConfig) -> None:
    """Refuse a key that is no setting, group or collection, and no argument of the mode."""
    known = [*SETTINGS, *GROUPS, *COLLECTIONS]
    known += [str(key) for key in config.mode if not str(key).startswith("_")]
    for key in config:
        if str(key) not in known:
            raise ConfigError(unknown_key(str(key), known))


def unknown_key(key: str, known: list[str], prefix: str = "") -> str:
    """The message for a key that does not exist, with near matches."""
    return f"{prefix}{key} is no key of the config{suggest(key, known, prefix)}"


def suggest(word: str, known: list[str], prefix: str = "") -> str:
    """`; did you mean ...` with near matches, else `; there are ...`."""
    folded = {name.casefold(): name for name in known}
    near = [
        folded[match] for match in get_close_matches(word.casefold(), list(folded), n=3, cutoff=0.6)
    ]
    names = ", ".join(prefix + name for name in (near or sorted(known)))
    return f"; did you mean {names}?" if near else f"; there are {names}"
