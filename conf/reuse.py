"""Parts that a job hands on to the next one of the same process: a sweep on a device loads its
model and captures its graphs once, not for every policy.

Handed on are the plugins of UNIT, together and only if the config of all of them and the device are
the same as before; whether what they built still fits the next engine is for them to say. They are
told by `keep_built()`. Where the executor has no such method, where a plugin outside the unit
answers one of its hooks, and after a job that failed, all is built anew."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any

from conf.compose import Nodes
from conf.instantiate import build

UNIT = ("executor", "model", "attention")
"""Where the plugins stand in the config."""
HOOKS = ("build_executor", "build_model", "build_attention")
"""What the unit answers for itself."""
KEEP = "keep_built"


class Reuse:
    """The plugins of the last job. active: hand them on; else every job builds its own."""

    def __init__(self) -> None:
        self.active = False
        self._key: Any = None
        self._plugins: dict[str, object] = {}

    def built(self, nodes: Nodes, device: str, beside: Iterable[object] = ()) -> dict[str, object]:
        """The plugins of named config nodes. What the job before left is let go first where it does
        not serve this one. beside: the job's other plugins."""
        if not self.active:
            return _built(nodes)
        unit = {name: at for name, at in nodes.items() if at[0] in UNIT}
        others = _built({name: at for name, at in nodes.items() if name not in unit})
        if any(hasattr(one, hook) for one in (*others.values(), *beside) for hook in HOOKS):
            self.forget()
            found = others | _built(unit)
        else:
            self._keep_only((device, dict(unit.values())))
            found = others | {name: self._plugin(*at) for name, at in unit.items()}
            if not hasattr(self._plugins.get("executor"), KEEP):
                self._key, self._plugins = None, {}
        return {name: found[name] for name in nodes}

    def forget(self) -> None:
        """Let go of what the last job left."""
        self._keep_only(None)

    def _keep_only(self, key: Any) -> None:
        if key is not None and key == self._key:
            return
        self._key, self._plugins = key, {}
        # A device's memory must be free before the next model comes, that of a failed job, too:
        # its traceback held all of it when it was forgotten.
        gc.collect()

    def _plugin(self, path: str, node: Mapping[str, Any]) -> object:
        if path not in self._plugins:
            self._plugins[path] = plugin = build(path, node)
            getattr(plugin, KEEP, bool)()
        return self._plugins[path]


def _built(nodes: Nodes) -> dict[str, object]:
    return {name: build(path, node) for name, (path, node) in nodes.items()}


REUSE = Reuse()
"""Of this process."""
