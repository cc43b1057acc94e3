"""Typed access to the hooks: registers plugins, refuses malformed ones, counts answers."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pluggy

from core.errors import PluginError, PolicyError
from core.hookspecs import PROJECT, HookSpecs, hookimpl

HOOK_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))
PREFIXES = ("decide_", "build_", "on_")
EACH_STEP = {"decide_batch", "on_step"}


@dataclass(slots=True)
class Usage:
    """How often a plugin was asked at a hook, and how often it gave an answer other than None."""

    asked: int = 0
    answered: int = 0


@dataclass(slots=True)
class Registered:
    """One plugin: the hooks it implements and its usage of each. default: asked last."""

    name: str
    plugin: object
    default: bool
    usage: dict[str, Usage] = field(default_factory=dict)


class Hooks:
    """All plugins of one engine.

    `who[hook]`: the plugin that answered last. `displaces`: one preempts for waiting requests.
    `oracle`: the predictor in charge is shown true lengths. `steady`, `listens`: see hookspecs."""

    def __init__(self, defaults: dict[str, object], plugins: dict[str, object]) -> None:
        """Register `defaults`, then `plugins` in order: the newest is asked first. Keys: names.

        Raises PluginError for a plugin without hooks, a misspelt or unmarked hook, or two plugins
        that answer one single-answer hook."""
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self.registered: dict[str, Registered] = {}
        self.who: dict[str, str] = {}
        for given in (defaults, plugins):
            for name, plugin in given.items():
                self._register(name, plugin, default=given is defaults)
        self._refuse_rivals()
        self._calls: dict[str, list[pluggy.HookImpl]] = {
            hook: getattr(self._manager.hook, hook).get_hookimpls()[::-1] for hook in HOOK_NAMES
        }
        preempting = self._plugins({"decide_preemption"})
        self.displaces = any(getattr(plugin, "displaces", False) for plugin in preempting)
        self.steady = all(getattr(plugin, "steady", False) for plugin in self._plugins(EACH_STEP))
        charge = self.in_charge()
        self.listens = any("on_step" in self.registered[one].usage for one in charge.values())
        predictor = self.registered.get(charge.get("build_length_predictor", ""))
        self.oracle = bool(predictor and getattr(predictor.plugin, "oracle", False))

    def ask(self, hook: str, query: object) -> Any:
        """The first answer to a `decide_*` hook other than None, else None: pluggy, but faster."""
        for call in self._calls[hook]:
            if (answer := call.function(query)) is not None:
                return answer
        return None

    def decide(self, hook: str, query: object) -> tuple[Any, str]:
        """An answer and whose it is. Raises PolicyError when nobody answers."""
        answer = self.ask(hook, query)
        if answer is None:
            raise PolicyError(f"no plugin answers {hook}")
        return answer, self.who[hook]

    def build(self, hook: str, query: object) -> Any:
        """Call a `build_*` hook. Raises PluginError when nobody answers."""
        built = getattr(self._manager.hook, hook)(query=query)
        if built is None:
            raise PluginError(f"no plugin answers {hook}")
        return built

    def build_all(self, hook: str, query: object) -> list[Any]:
        """Every answer to a `build_*` hook that admits several (sinks), in registration order."""
        return list(reversed(getattr(self._manager.hook, hook)(query=query)))

    def notify(self, hook: str, query: object) -> None:
        """Call an `on_*` hook."""
        for call in self._calls[hook]:
            call.function(query)

    def in_charge(self) -> dict[str, str]:
        """hook -> the plugin asked first, for every hook that decides or builds."""
        deciding = ((hook, calls) for hook, calls in self._calls.items() if hook[:3] != "on_")
        return {hook: calls[0].plugin_name for hook, calls in deciding if calls}

    def _plugins(self, hooks: set[str]) -> list[object]:
        return [e.plugin for e in self.registered.values() if e.usage.keys() & hooks]

    def _register(self, name: str, plugin: object, default: bool) -> None:
        if name in self.registered:
            raise PluginError(f"two plugins are named {name!r}")
        entry = Registered(name, plugin, default)
        proxy = SimpleNamespace()
        for hook, method in _implementations(name, plugin):
            entry.usage[hook] = Usage()
            setattr(proxy, hook, self._wrap(entry, hook, method))
        if not entry.usage:
            raise PluginError(f"plugin {name} ({type(plugin).__name__}) implements no hook")
        self._manager.register(proxy, name=name)
        self._manager.check_pending()
        self.registered[name] = entry

    def _wrap(self, entry: Registered, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        usage, who, name = entry.usage[hook], self.who, entry.name

        def call(query: Any) -> Any:
            usage.asked += 1
            try:
                answer = method(query=query)
            except Exception as error:
                error.add_note(f"raised by plugin {name} at {hook}")
                raise
            if answer is not None:
                usage.answered += 1
                who[hook] = name
            return answer

        return hookimpl(call)

    def _refuse_rivals(self) -> None:
        for hook in HOOK_NAMES:
            spec = getattr(HookSpecs, hook).tritium_spec
            rivals = [e.name for e in self.registered.values() if hook in e.usage and not e.default]
            if spec["firstresult"] and len(rivals) > 1:
                raise PluginError(
                    f"{hook} has {len(rivals)} configured plugins: {', '.join(rivals)}; name one"
                )


def _implementations(name: str, plugin: object) -> Iterable[tuple[str, Callable[..., Any]]]:
    for attribute in dir(plugin):
        if attribute.startswith("_"):
            continue
        method = inspect.getattr_static(plugin, attribute)
        marked = getattr(method, f"{PROJECT}_impl", None) is not None
        if not marked and not attribute.startswith(PREFIXES):
            continue
        if attribute not in HOOK_NAMES:
            raise PluginError(
                f"plugin {name} has {attribute}, no hook; hooks are {', '.join(HOOK_NAMES)}"
            )
        if not marked:
            raise PluginError(
                f"plugin {name} has {attribute} without @hookimpl: it would never be called"
            )
        bound = getattr(plugin, attribute)
        parameters = list(inspect.signature(bound).parameters)
        if parameters != ["query"]:
            raise PluginError(
                f"{name}.{attribute} must take one argument named query, got {parameters}"
            )
        yield attribute, bound
