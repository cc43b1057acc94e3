"""Parts of an engine on their way to another process, which builds its own from them.

Besides what pickle takes, two things are sent: an object that a module holds under its own name,
such as a kernel that a decorator left in its function's place, goes by that name; and the hooks
behind a `build_*` query go as the plugins that answer `build_attention`."""

import io
import pickle
import sys
from operator import attrgetter
from pkgutil import resolve_name
from types import FunctionType
from typing import Any

from core.errors import ConfigError
from core.hooks import Hooks

HOOK = "build_attention"


def packed(parts: object, field: str) -> bytes:
    """`parts` as bytes for `pickle.loads`. Raises ConfigError naming the field that wants them in
    another process, where that cannot be."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(parts)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{field} must be 1 for parts that do not pickle, so that no other process can build"
            f" them: {error}"
        ) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Hooks):
            asked = [entry for entry in obj.registered.values() if HOOK in entry.usage]
            behind, first = (
                {entry.name: entry.plugin for entry in asked if entry.default is default}
                for default in (True, False)
            )
            return Hooks, (behind, first)
        if not isinstance(obj, type | FunctionType) and (name := _name_of(obj)):
            return resolve_name, (name,)
        return NotImplemented


def _name_of(obj: Any) -> str | None:
    """`module:name` under which a module holds the object, None if none does."""
    function = getattr(obj, "fn", obj)  # of a kernel, compiled or interpreted
    module, name = (getattr(function, one, None) for one in ("__module__", "__qualname__"))
    if not isinstance(module, str) or not isinstance(name, str) or module not in sys.modules:
        return None
    try:
        held = attrgetter(name)(sys.modules[module])
    except AttributeError:
        return None
    return f"{module}:{name}" if held is obj else None
