"""Clocks, and the ranges of the typed config."""

import time

import pytest

from conf.settings import RunConfig
from core.config import EngineConfig, require
from core.errors import ConfigError
from plugins.shared.clocks import RealClock, VirtualClock


def test_virtual_clock_moves_only_when_told_and_never_back():
    clock = VirtualClock()
    assert clock.now() == clock.now() == 0.0
    clock.wait_until(2.5)
    clock.wait_until(1.0)
    assert clock.now() == 2.5
    clock.restart()
    assert clock.now() == 0.0


def test_real_clock_waits_and_restarts():
    clock = RealClock()
    first = clock.now()
    clock.wait_until(first + 0.02)
    assert clock.now() >= first + 0.02
    clock.wait_until(0.0)
    before_s = time.perf_counter()
    clock.restart()
    now_s = clock.now()
    assert 0 <= now_s <= time.perf_counter() - before_s


@pytest.mark.parametrize(
    ("field", "good", "bad", "rule"),
    [
        ("max_num_seqs", 1, 0, ">= 1"),
        ("max_num_batched_tokens", 1, 0, ">= 1"),
        ("max_model_len", 2, 1, ">= 2 or null"),
        ("max_model_len", None, -1, ">= 2 or null"),
        ("pool_tokens", 1, 0, ">= 1 or auto"),
        ("pool_tokens", "auto", "many", ">= 1 or auto"),
        ("memory_share", 1.0, 0.0, r"in \(0, 1\]"),
        ("memory_share", 0.01, 1.01, r"in \(0, 1\]"),
    ],
)
def test_engine_config_range(field, good, bad, rule):
    assert getattr(EngineConfig(**{field: good}), field) == good
    with pytest.raises(ConfigError, match=rf"^engine\.{field} must be {rule}, got {bad!r}$"):
        EngineConfig(**{field: bad})


@pytest.mark.parametrize(
    ("field", "good", "bad", "rule"),
    [
        ("seed", 2**63 - 1, 2**63, r"in \[0, 2\*\*63\)"),
        ("seed", 0, -1, r"in \[0, 2\*\*63\)"),
        ("device", "cuda:1", "cuda:", "auto, cpu, cuda or cuda:N"),
        ("device", "auto", "gpu", "auto, cpu, cuda or cuda:N"),
        ("device", "cpu", "cpu ", "auto, cpu, cuda or cuda:N"),
        ("name", None, "  ", "null or not empty"),
        ("name", "x", "", "null or not empty"),
    ],
)
def test_run_config_range(field, good, bad, rule):
    assert getattr(RunConfig(**{field: good}), field) == good
    with pytest.raises(ConfigError, match=rf"^{field} must be {rule}, got {bad!r}$"):
        RunConfig(**{field: bad})


def test_configs_do_not_share_their_engine():
    assert RunConfig().engine is not RunConfig().engine


def test_require_passes_what_holds():
    require(True, "field", "rule", 1)
