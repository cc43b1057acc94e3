"""What the command line asks for, read before Hydra starts: the plugin path, unknown names."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from conf.schema import COLLECTIONS, GROUPS, SETTINGS, suggest, unknown_key
from core.errors import ConfigError

ROOT = Path(__file__).resolve().parent
FIXED = (*SETTINGS, *COLLECTIONS)
FREE_TEXT = ("prompt", "mode.prompt")
MODE = re.compile(r"hydra|hydra/.*|hydra\.mode|experiment|plugin_path")
SINGLE = ("kernel", "router")  # groups without a default, of one choice


def prepare(arguments: Sequence[str]) -> list[str]:
    """The command line for Hydra. Puts `plugin_path=DIR` on the import path, also of child
    processes, and its conf/ on Hydra's search path.

    Raises ConfigError for a folder, group or option that does not exist, before anything runs.
    """
    arguments = sorted(map(_quoted, arguments), key=_is_override)  # Hydra wants its flags together
    overrides = parse(arguments)
    folders = [ROOT]
    path = _plugin_path(overrides)
    if path is not None:
        _import_from(path)
        if (path / "conf").is_dir():
            folders.append(path / "conf")
            _refuse_shadowed(path / "conf")
            arguments.append(f'hydra.searchpath=["file://{path / "conf"}"]')
    for override in overrides:
        _check(override, folders)
    return arguments


def may_set_mode(arguments: Sequence[str]) -> bool:
    """Whether a command line for Hydra may ask for several runs, which hydra.mode does: by flags,
    an experiment, or files of the user's."""
    if not all(map(_is_override, arguments)):
        return True
    return any(MODE.fullmatch(override.key_or_group) for override in parse(arguments))


def parse(arguments: Iterable[str]) -> list[Override]:
    """The overrides among command line arguments."""
    return OverridesParser.create().parse_overrides(list(filter(_is_override, arguments)))


def options(group: str, folders: Iterable[Path]) -> list[str]:
    """The names that a group offers."""
    return sorted(file.stem for folder in folders for file in (folder / group).glob("*.yaml"))


def groups(folders: Iterable[Path]) -> list[str]:
    """All groups but Hydra's own."""
    found = {file.parent.name for folder in folders for file in folder.glob("*/*.yaml")}
    return sorted(found - {"hydra"})


def chosen(override: Override) -> list[str]:
    """The option names in a group's override: one, those of a list, or those of a sweep."""
    if override.value_type is None or override.is_delete():
        return []
    values = override.sweep_iterator() if override.is_discrete_sweep() else iter([override.value()])
    names: list[str] = []
    for value in values:
        names += [str(name) for name in value] if isinstance(value, list) else [str(value)]
    return names


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def _quoted(argument: str) -> str:
    """Free text may hold commas and braces; Hydra would read them as a sweep."""
    key, _, text = argument.partition("=")
    whole = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if key not in FREE_TEXT or whole or not text:
        return argument
    # Within Hydra's quotes a backslash escapes a quote alone, and itself only before one;
    # OmegaConf reads ${ as an interpolation unless a backslash stands before it.
    escaped = re.sub(r'(\\*)(")', r"\1\1\\\2", text.replace("${", "\\${"))
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'{key}="{escaped}"'


def _plugin_path(overrides: Sequence[Override]) -> Path | None:
    if any(override.key_or_group == "hydra.searchpath" for override in overrides):
        raise ConfigError("hydra.searchpath must be left to plugin_path=DIR and its conf/ folder")
    for override in overrides:
        if override.key_or_group == "plugin_path":
            value: Any = None if override.is_sweep_override() else override.value()
            if value is None:
                raise ConfigError(f"plugin_path must be one folder, got {override.input_line!r}")
            path = Path(str(value)).expanduser().resolve()
            if not path.is_dir():
                raise ConfigError(f"plugin_path must be an existing folder, got {str(value)!r}")
            return path
    return None


def _import_from(path: Path) -> None:
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(path) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(path), *known])


def _refuse_shadowed(folder: Path) -> None:
    """A file of the user's with a name of ours would never be read."""
    for file in sorted(folder.rglob("*.yaml")):
        if (ROOT / file.relative_to(folder)).exists():
            raise ConfigError(f"{file} must have a name that Tritium's conf/ does not use already")


def _check(override: Override, folders: Sequence[Path]) -> None:
    key, available = override.key_or_group, groups(folders)
    root = key.replace("/", ".").split(".")[0]
    if key in available:
        _check_group(override, options(key, folders))
    elif (override.is_add() or "/" in key) and root not in ("hydra", *available, *FIXED):
        raise ConfigError(unknown_key(root, [*available, *FIXED]))


def _check_group(override: Override, available: list[str]) -> None:
    key, names = override.key_or_group, chosen(override)
    value = (override.input_line or "").partition("=")[2]
    if key in GROUPS and override.is_add():
        raise ConfigError(f"{key} has a default; use {key}={value} without +")
    if key not in GROUPS and not override.is_add() and not override.is_delete():
        raise ConfigError(f"{key} has no default to replace; use +{key}={value}")
    for name in names:
        if name not in available:
            raise ConfigError(
                f"{key} must be one of its files, got {name!r}{suggest(name, available)}"
            )
    if key in SINGLE and not override.is_sweep_override() and len(names) > 1:
        raise ConfigError(f"{key} must be one name, got {value}")
