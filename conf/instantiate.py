"""The one place where a config node becomes an object, after a check of its arguments."""

import inspect
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from pkgutil import resolve_name
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import unknown_key
from core.errors import ConfigError, TritiumError


def build(path: str, node: Mapping[str, Any]) -> Any:
    """The object that `node` (resolved, plain values) describes, from `path` in the config.

    Raises ConfigError naming the key for a missing or wrong `_target_`, an argument that is
    unknown, missing or of the wrong type, or a value that the constructor refuses.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(target, str):
        raise ConfigError(
            f"{path} must have a _target_ naming a class (module.Class), got {node!r}"
        )
    found = _locate(path, target)
    arguments = checked_arguments(path, found, node)
    try:
        return found(**arguments)
    except TritiumError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def checked_arguments(path: str, target: type, node: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in `node` for `target`'s constructor, converted to its annotations where that
    loses nothing ("0.5" for a float). Raises ConfigError as `build` does."""
    parameters = inspect.signature(target).parameters
    known = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]
    given = {str(key): value for key, value in node.items() if key != "_target_"}
    if len(known) == len(parameters):
        for key in given:
            if key not in known:
                raise ConfigError(unknown_key(key, known, f"{path}."))
    for name in known:
        if (
            parameters[name].default is inspect.Parameter.empty
            and given.get(name, MISSING) == MISSING
        ):
            raise ConfigError(
                f"{path}.{name} must be given: {target.__name__} has no default for it"
            )
    constructor: Any = target.__init__  # type: ignore[misc]
    hints = get_type_hints(constructor)
    return {
        key: _converted(f"{path}.{key}", value, hints.get(key, Any)) for key, value in given.items()
    }


def _converted(path: str, value: Any, hint: Any) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return _nested(path, value)
    hint = _supported(hint)
    holder = make_dataclass("Holder", [("value", hint, field(default=MISSING))])
    try:
        typed = OmegaConf.structured(holder)
        typed.value = value
        plain: Any = OmegaConf.to_container(typed)
        given = plain["value"]
        return tuple(given) if get_origin(hint) is tuple and given is not None else given
    except OmegaConfBaseException:
        name = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
        raise ConfigError(f"{path} must be {name}, got {value!r}") from None


def _nested(path: str, node: Mapping[str, Any]) -> Any:
    """An object among the arguments, such as a kernel: whatever Hydra can instantiate."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        raise ConfigError(f"{path}: {error.__cause__ or error}") from error


def _supported(hint: Any) -> Any:
    """`hint`, or Any where OmegaConf has no node for it (callables, literals, abstract classes)."""
    try:
        OmegaConf.structured(make_dataclass("Probe", [("value", hint, field(default=MISSING))]))
    except OmegaConfBaseException:
        return Any
    return hint


def _locate(path: str, target: str) -> type:
    rule = f"{path}._target_ must name a class"
    try:
        found = resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{rule}, got {target!r}: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{rule}, got {target!r}, a {type(found).__name__}")
    return found
