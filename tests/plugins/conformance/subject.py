"""A policy under test: how it is found, made and what it says of itself.

A class may state, as attributes or properties:

  starves              why it lets some requests wait without end, by design: reported, not failed
  starvation_bound_s   after that many seconds of waiting a request goes before those that came
                       later, whatever its priority from 0 to 9; default 0: nobody is passed over
                       for long
  starvation_bound_steps   the same in engine steps
"""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf.compose import register
from conf.instantiate import build, checked_arguments
from conf.overrides import ROOT, options
from core.hooks import Hooks

SINGLE_GROUPS = ("batching", "allocator", "cache", "step_time")
DECISIONS = (
    "decide_order",
    "decide_admission",
    "decide_batch",
    "decide_preemption",
    "decide_cache_admission",
)
OBJECTS = (
    "build_allocator",
    "build_prefix_cache",
    "build_evictor",
    "build_length_predictor",
    "build_step_time_model",
)
OBSERVERS = (
    "on_run_start",
    "on_step",
    "on_request_arrived",
    "on_request_finished",
    "on_run_end",
)
ROUTES = ("decide_route",)
OUTSIDE = (
    "build_model",
    "build_attention",
    "build_executor",
    "build_sink",
    "build_server",
)
"""Hooks that are no policy's; their plugins have tests of their own."""

KNOWN = DECISIONS + OBJECTS + OBSERVERS + ROUTES
"""Hooks that the kit takes a policy through. A new hook belongs here, with checks, or in OUTSIDE:
test_conformance_kit.py holds the two against core.hooks.HOOK_NAMES."""

NAME = "subject"
"""What the policy is called in the engine."""


@dataclass(frozen=True)
class Subject:
    """A policy: how to make a fresh one, and the hooks it implements. quick: the short form of the
    normal suite."""

    name: str
    make: Callable[[], Any]
    hooks: tuple[str, ...]
    package: str
    starves: str
    starvation_bound_s: float
    starvation_bound_steps: int
    steady: bool
    quick: bool
    arguments: str | None = None  # as JSON, of one named on the command line

    def implements(self, *hooks: str) -> bool:
        """Whether it has any of them."""
        return any(hook in self.hooks for hook in hooks)

    @property
    def in_engine(self) -> bool:
        """It has a hook that an engine asks, and not a router alone."""
        return self.implements(*DECISIONS, *OBJECTS, *OBSERVERS)

    @property
    def statements(self) -> list[str]:
        """What it says of itself, in words."""
        said = [word for word in ("displaces", "oracle", "steady") if getattr(self.make(), word, 0)]
        bounds = (self.starvation_bound_s, "s"), (self.starvation_bound_steps, "steps")
        said += [
            f"nobody is passed over for more than {bound:g} {unit}"
            for bound, unit in bounds
            if bound
        ]
        return said + ([f"starves: {self.starves}"] if self.starves else [])

    @property
    def observes(self) -> bool:
        """It learns from results, which come a step later where launches overlap."""
        learns = "on_step", "on_request_finished", "build_length_predictor", "build_step_time_model"
        return self.implements(*learns)


def load(spec: str, arguments: str | None = None) -> Subject:
    """`package.module:Class` or `path/to/file.py:Class`, with constructor arguments as JSON. Raises
    ValueError, ImportError, AttributeError or a TritiumError that says what is wrong."""
    location, _, name = spec.partition(":")
    if not name:
        raise ValueError(f"must be module:Class, got {spec!r}")
    target = getattr(_module(location), name)
    if not inspect.isclass(target):
        raise ValueError(f"must name a class, got {type(target).__name__} {name!r}")
    given = json.loads(arguments) if arguments else {}
    if not isinstance(given, dict):
        raise ValueError(f"--policy-args must be a JSON object, got {arguments!r}")
    return replace(subject_of(spec, target, given, quick=False), arguments=arguments)


def subject_of(
    name: str, target: type, arguments: Mapping[str, Any] | None = None, quick: bool = True
) -> Subject:
    """The subject of a class and its arguments, checked as the config checks them."""
    given = checked_arguments(name, target, arguments or {})
    return describe(name, lambda: target(**given), quick)


def describe(name: str, make: Callable[[], Any], quick: bool = True) -> Subject:
    """The subject that `make` makes. Raises PluginError for one that is no plugin, ValueError for
    one that has no hook the kit knows."""
    plugin = make()
    Hooks({}, {NAME: plugin})
    hooks = tuple(hook for hook in KNOWN if hasattr(plugin, hook))
    if not hooks:
        raise ValueError(f"has no hook of a policy; those are {', '.join(KNOWN)}")
    return Subject(
        name,
        make,
        hooks,
        type(plugin).__module__,
        str(getattr(plugin, "starves", "")),
        float(getattr(plugin, "starvation_bound_s", 0.0)),
        int(getattr(plugin, "starvation_bound_steps", 0)),
        bool(getattr(plugin, "steady", False)),
        quick,
    )


def shipped() -> list[Subject]:
    """Every policy that conf/ names, with the arguments it has there: conf/policy, the groups of
    one choice, conf/router, and what stands behind the hooks. The same class with the same
    arguments once."""
    nodes = _composed() | {
        f"{group}={name}": _file(group, name)
        for group in (*SINGLE_GROUPS, "router")
        for name in options(group, [ROOT])
    }
    subjects, seen = [], []
    for name, node in nodes.items():
        if node in seen:
            continue
        seen.append(node)
        try:
            found = describe(name, _maker(name, node))
        except ValueError:  # a plugin of the defaults that is no policy
            continue
        subjects.append(found)
    return subjects


def _maker(name: str, node: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: build(name, node)


def _composed() -> dict[str, Mapping[str, Any]]:
    """The nodes of all policies and defaults, from one config that names them all."""
    register()
    names = options("policy", [ROOT])
    with initialize_config_dir(str(ROOT), version_base="1.3"):
        config = compose("config", [f"+policy=[{','.join(names)}]"])
    nodes: dict[str, Mapping[str, Any]] = {}
    for collection in ("plugins", "defaults_behind"):
        plain = OmegaConf.to_container(config[collection], resolve=True)
        nodes |= {f"{collection}.{name}": node for name, node in plain.items()}
    return nodes


def _file(group: str, name: str) -> Mapping[str, Any]:
    node = yaml.safe_load((ROOT / group / f"{name}.yaml").read_text())
    return node if isinstance(node, dict) else {}


def _module(location: str) -> Any:
    if not location.endswith(".py"):
        return importlib.import_module(location)
    path = Path(location).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"must name a Python file, got {location!r}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # it may import its neighbours
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look the module up by name
    spec.loader.exec_module(module)
    return module
