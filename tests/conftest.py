"""Shared by all tests: the gpu marker's rule, and `run.py` in this process."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf.device import GPU_DRIVERS
from tests.kernels.interpreter import patch_once

# Test processes share the cores: two of them with two spinning OpenMP threads each crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton decides when it is imported whether kernels are compiled or interpreted.
if not any(Path(driver).exists() for driver in GPU_DRIVERS):
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["tests.kernels.conformance.plugin", "tests.plugins.conformance.plugin"]

PLUGINS = '''
import json

import numpy as np

from core.hookspecs import hookimpl
from core.queries import PreemptionDecision


class Mine:
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    @hookimpl
    def decide_preemption(self, query):
        return PreemptionDecision(query.candidates.id)


class Probe:
    """A mode that runs nothing: it leaves what it was given in the folder."""

    def __init__(self, fails_on_seed: int | None = None) -> None:
        self.fails_on_seed = fails_on_seed

    def run(self, session):
        if session.run.seed == self.fails_on_seed:
            raise ZeroDivisionError("probe was told to fail")
        run = session.run
        summary = {"policy": run.policy, "hooks": run.hooks, "seed": run.seed, "name": run.name,
                   "weight": getattr(session.hooks.registered.get("mine"), "plugin", None)
                   and session.hooks.registered["mine"].plugin.weight}
        (session.folder / "summary.json").write_text(json.dumps(summary))
        return summary
'''
POLICY = "# @package plugins.mine\n_target_: outside.Mine\nweight: 0.5\n"
MODE = "# @package _global_\nmode:\n  _target_: outside.Probe\n  fails_on_seed: null\n"


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code and what it printed."""

    code: int
    out: str
    err: str


def pytest_addoption(parser: pytest.Parser) -> None:
    """--live: also tests that take minutes over a server in processes of its own."""
    parser.addoption("--live", action="store_true", help="also tests of a live server (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is no CUDA device, those marked live without
    --live."""
    if not config.getoption("--live"):
        for item in items:
            if item.get_closest_marker("live"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: --live"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What importing thousands of tests left stays to the end: no collection walks through it."""
    gc.collect()
    gc.freeze()
    if "triton.runtime.interpreter" in sys.modules:
        patch_once()


@pytest.fixture(autouse=True)
def _stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode freezes what its start left, and thaws everything at its end."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def plugin_folder(tmp_path: Path) -> Path:
    """A user's folder outside the clone: policy `mine` and a mode `probe` that runs nothing."""
    folder = tmp_path / "user plugins"
    for name, text in {"policy/mine": POLICY, "mode/probe": MODE}.items():
        file = folder / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (folder / "outside.py").write_text(PLUGINS)
    return folder


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """`python run.py ARGUMENTS` in this process, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)  # the user's traceback is no message
    import run

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        capfd.readouterr()
        try:
            code = run.command_line(run.job)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    yield call
    sys.modules.pop("outside", None)


@pytest.fixture
def probe(command: Callable[..., Outcome], plugin_folder: Path) -> Callable[..., Outcome]:
    """As `command`, with mode=probe and plugin_path set: everything but the run itself."""

    def call(*arguments: str) -> Outcome:
        path = f'plugin_path="{plugin_folder}"'
        return command(path, "executor=fake", "mode=probe", *arguments)

    return call
