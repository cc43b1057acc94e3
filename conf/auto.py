"""Choices left to the device: a group's node may name one file for each kind of device, and others
for engine.deterministic."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from conf.device import resolve_device
from core.config import require

ROOT = Path(__file__).resolve().parent
FOLDERS = {"attention": "kernel", "ops": "ops"}
KEY = "by_device"
DETERMINISTIC = "by_device_deterministic"


def choose_by_device(config: DictConfig) -> DictConfig:
    """The config with every `by_device` node replaced by the file it names for the device. Where
    another choice was merged over such a node, as +kernel=NAME does, that one stands."""
    waiting = [group for group in FOLDERS if KEY in (config.get(group) or {})]
    if not waiting:
        return config
    chosen = config.copy()
    with open_dict(chosen):
        for group in waiting:
            names = chosen[group].pop(KEY)
            exact = chosen[group].pop(DETERMINISTIC, names)
            if OmegaConf.select(config, "engine.deterministic"):
                names = exact
            if not chosen[group]:
                kind = resolve_device(str(config.device)).partition(":")[0]
                require(kind in names, f"{group}.{KEY}", "a choice for each device", kind)
                chosen[group] = OmegaConf.load(ROOT / FOLDERS[group] / f"{names[kind]}.yaml")
    return chosen
