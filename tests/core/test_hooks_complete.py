"""Every hook is complete: a spec with a docstring, a test of its name, a default, a README line."""

import ast
import re
from pathlib import Path

import pytest

from core.hooks import HOOK_NAMES
from core.hookspecs import HookSpecs

ROOT = Path(__file__).parents[2]


def test_every_hook_has_a_test_of_its_name():
    tree = ast.parse(Path(__file__).with_name("test_hooks.py").read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [hook for hook in HOOK_NAMES if f"test_hook_{hook}" not in tests] == []


def test_every_hook_has_a_docstring():
    assert [hook for hook in HOOK_NAMES if not getattr(HookSpecs, hook).__doc__] == []


def test_every_deciding_or_building_hook_has_a_default_in_the_config():
    named = set()
    for file in (ROOT / "conf").rglob("*.yaml"):
        for target in re.findall(r"_target_: (plugins\.[\w.]+)", file.read_text()):
            named |= hooks_of(target)
    missing = [hook for hook in HOOK_NAMES if not hook.startswith("on_") and hook not in named]
    assert not missing


def hooks_of(target):
    """Methods marked @hookimpl of a class, read without importing it."""
    module, _, name = target.rpartition(".")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {
        node.name
        for node in found.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "hookimpl" for d in node.decorator_list)
    }


def test_every_hook_has_a_line_in_the_readme():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md yet")
    text = readme.read_text()
    assert [hook for hook in HOOK_NAMES if f"`{hook}`" not in text] == []
