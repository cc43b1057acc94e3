"""Runs arranged for comparison: by setting, then by what is compared, then by seed."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError
from experiments.paper.folders import Run, select

BY = ("plugins",)  # what `+policy=` fills
NO_SETTING = ("name", "seed", "progress", "records", "plugin_path", "sinks")
Leaves = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """One setting. leaves: its config keys that differ between settings, with their values. runs:
    label of what is compared -> seed -> run."""

    leaves: Leaves
    runs: dict[str, dict[int, Run]]

    @property
    def setting(self) -> str:
        """`key=value ...` of what sets it apart; "" if there is one setting alone."""
        return " ".join(f"{key}={value}" for key, value in self.leaves.items())

    @property
    def short(self) -> str:
        """The same with the last part of each key alone."""
        return " ".join(f"{key.split('.')[-1]}={value}" for key, value in self.leaves.items())


def arrange(runs: Iterable[Run], by: Sequence[str] = BY) -> list[Group]:
    """Groups of runs that share all of their config but the seed and the paths in `by`.

    Raises ConfigError where two runs have the same setting, label and seed."""
    runs = list(runs)
    labels = _labels(runs, by)
    settings = [_setting(run, by) for run in runs]
    differing = _differing(settings)
    found: dict[str, Group] = {}
    for run, label, setting in zip(runs, labels, settings, strict=True):
        leaves = {key: setting[key] for key in differing if key in setting}
        group = found.setdefault(_key(setting), Group(leaves, defaultdict(dict)))
        seeds = group.runs[label]
        if run.seed in seeds:
            where = f" with {group.setting}" if group.setting else ""
            raise ConfigError(
                f"FOLDER must hold one run of {label}, seed {run.seed}{where}; there are "
                f"{seeds[run.seed].folder} and {run.folder}"
            )
        seeds[run.seed] = run
    ordered = sorted(found.values(), key=lambda group: _sortable(group.leaves))
    return [Group(group.leaves, dict(group.runs)) for group in ordered]


def flatten(value: Any, path: str = "") -> Leaves:
    """Dotted path -> value of every leaf; an empty dict or list is a leaf."""
    if isinstance(value, dict) and value:
        leaves: Leaves = {}
        for key, inner in value.items():
            leaves |= flatten(inner, f"{path}.{key}" if path else str(key))
        return leaves
    return {path: value}


def _setting(run: Run, by: Sequence[str]) -> Leaves:
    hidden = (*NO_SETTING, *by)
    return {
        key: value
        for key, value in flatten(run.config).items()
        if not any(key == path or key.startswith(f"{path}.") for path in hidden)
    }


def _labels(runs: Sequence[Run], by: Sequence[str]) -> list[str]:
    """The policy label, or the values at other paths; variants of one label are told apart by the
    arguments in which they differ."""
    short = [" ".join(_label(run, path) for path in by) for run in runs]
    values = [flatten({path: select(run.config, path) for path in by}) for run in runs]
    labels = list(short)
    for name in set(short):
        places = [index for index, label in enumerate(short) if label == name]
        differing = _differing([values[index] for index in places])
        for index in places:
            own = [
                f"{key.rpartition('.')[2]}={values[index].get(key)}"
                for key in differing
                if key in values[index]
            ]
            labels[index] = f"{name} ({', '.join(own)})" if own else name
    return labels


def _label(run: Run, path: str) -> str:
    if path == "plugins":
        return run.policy
    value = select(run.config, path)
    if isinstance(value, dict):
        return str(value.get("name") or value.get("_target_", path)).rpartition(".")[2]
    return f"{path.rpartition('.')[2]}={value}"


def _differing(leaves: Sequence[Leaves]) -> list[str]:
    """Keys whose value is not the same everywhere."""
    keys = {key: None for one in leaves for key in one}
    return [key for key in keys if len({_key(one.get(key)) for one in leaves}) > 1]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _sortable(leaves: Leaves) -> list[tuple[str, float, str]]:
    return [
        (key, float(value), "") if isinstance(value, int | float) else (key, 0.0, str(value))
        for key, value in leaves.items()
    ]
