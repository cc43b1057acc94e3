"""What summaries tell of a run besides its metrics: which one it is, and who decided."""

import warnings
from typing import Any

from core.errors import PluginError
from core.hooks import HOOK_NAMES, Hooks, Usage
from plugins.shared.session import Session


def head(session: Session, mode: str, workload: str) -> dict[str, Any]:
    """What every summary begins with: which run it is of."""
    run = session.run
    return {
        "name": run.name,
        "mode": mode,
        "policy": run.policy,
        "workload": workload,
        "seed": run.seed,
        "sweep": run.manifest.get("sweep"),
    }


def summary_of_hooks(hooks: Hooks) -> list[dict[str, Any]]:
    """hook, plugin, asked, answered for every implementation, for reports."""
    return [
        {"hook": hook, "plugin": plugin, "asked": usage.asked, "answered": usage.answered}
        for hook, plugin, usage in usage_of_hooks(hooks)
    ]


def usage_of_hooks(hooks: Hooks) -> list[tuple[str, str, Usage]]:
    """(hook, plugin, usage) for every implementation, hooks in the order of the specs."""
    return [
        (hook, entry.name, entry.usage[hook])
        for hook in HOOK_NAMES
        for entry in hooks.registered.values()
        if hook in entry.usage
    ]


def check_all_asked(hooks: Hooks, strict: bool) -> None:
    """Warn (strict: raise PluginError) about configured `decide_*` plugins never asked."""
    for hook, name, usage in usage_of_hooks(hooks):
        idle = hook.startswith("decide_") and usage.asked == 0
        if idle and not hooks.registered[name].default:
            text = f"plugin {name} was never asked at {hook} in this run"
            if strict:
                raise PluginError(text)
            warnings.warn(text, stacklevel=2)
