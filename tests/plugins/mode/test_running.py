"""An engine for as long as a mode runs it."""

import gc
from pathlib import Path

import pytest

from plugins.mode.running import YOUNG_OBJECTS, running
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
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), running(make_session(tmp_path)):
        fail(done)
    assert gc.get_threshold() == before
    assert done == ["collect", "freeze", "serves", "unfreeze"]


def test_young_objects_are_looked_through_less_often_meanwhile(tmp_path: Path) -> None:
    with running(make_session(tmp_path)):
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
