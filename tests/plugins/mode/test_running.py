"""An engine for as long as a mode runs it."""

import gc
from pathlib import Path

import pytest

from plugins.mode.running import running
from tests.plugins.mode.mode_session import make_session


def fail(done: list[str]) -> None:
    done.append("serves")
    raise ZeroDivisionError


def test_what_start_up_left_is_frozen_while_the_engine_runs_whatever_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: done.append(name))
    with pytest.raises(ZeroDivisionError), running(make_session(tmp_path)):
        fail(done)
    assert done == ["collect", "freeze", "serves", "unfreeze"]
