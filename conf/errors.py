"""Turns the errors of Hydra and OmegaConf into one that names the key, the rule and the value."""

import re
from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from conf.overrides import ROOT, groups, parse
from conf.schema import unknown_key

KINDS = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false", "str": "text"}


def readable(error: BaseException, overrides: Sequence[str]) -> str:
    """One message. overrides: the command line's, with which near matches are found."""
    texts = [str(one).strip() for one in (error, error.__cause__) if one is not None and str(one)]
    text = "\n".join(texts) or type(error).__name__
    key = re.search(r"full_key: (\S+)", text)
    where = key.group(1) if key else ""
    wrong = re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    if wrong:
        return (
            f"{where} must be {KINDS.get(wrong.group(2), wrong.group(2))}, got {wrong.group(1)!r}"
        )
    mixed = re.search(r"Value '(.*)' of type '\w+' is incompatible .* 'Union\[int, str\]'", text)
    if mixed:
        return f"{where} must be an integer or text, got {mixed.group(1)!r}"
    flag = re.search(r"Value '(.*)' is not a valid bool", text)
    if flag:
        return f"{where} must be true or false, got {flag.group(1)!r}"
    choice = re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", text)
    if choice:
        return f"{where} must be one of {choice.group(2)}, got {choice.group(1)!r}"
    absent = re.search(r"Key '(\w+)' (?:is not in struct|not in '\w+')", text)
    if absent:
        return _unknown(where or absent.group(1), overrides)
    if "is not Optional" in text or "Incompatible value 'None'" in text:
        return f"{where} must not be null"
    return text


def _unknown(key: str, overrides: Sequence[str]) -> str:
    parent, _, last = key.rpartition(".")
    config = _base(overrides)
    node = OmegaConf.select(config, parent) if parent else config
    known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    known += [] if parent else groups([ROOT])
    known = [name for name in known if name not in ("_target_", last)]
    return unknown_key(last, known, f"{parent}." if parent else "")


def _base(overrides: Sequence[str]) -> DictConfig:
    """The config with the command line's choices of groups and none of its values."""
    parts = [one for one in parse(overrides) if "." not in one.key_or_group]
    kept = [one.input_line for one in parts if not one.is_sweep_override() and one.input_line]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT), version_base="1.3"):
        for attempt in ([line for line in kept if "hydra" not in line], []):
            try:
                return compose("config", overrides=attempt)
            except HydraException:
                continue
    return OmegaConf.create({})
