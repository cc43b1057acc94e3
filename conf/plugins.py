"""The plugins of a job, built from its config."""

from conf.compose import Job, Nodes, default_nodes, plugin_nodes
from conf.instantiate import build
from conf.reuse import REUSE
from core.hooks import Hooks


def build_hooks(job: Job) -> Hooks:
    """New plugins, registered. Each engine needs its own: a policy may remember what it decided."""
    return Hooks(_built(default_nodes(job)), _built(plugin_nodes(job)))


def take_over_hooks(job: Job, device: str) -> Hooks:
    """The same, but for those that the job before handed on (conf/reuse.py)."""
    plugins = _built(plugin_nodes(job))
    return Hooks(REUSE.built(default_nodes(job), device, plugins.values()), plugins)


def _built(nodes: Nodes) -> dict[str, object]:
    return {name: build(path, node) for name, (path, node) in nodes.items()}
