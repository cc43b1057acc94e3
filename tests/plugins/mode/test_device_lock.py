"""plugins/mode/device_lock.py: one holder a device, across processes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import ConfigError
from plugins.executor.torch_runner import TorchRunner
from plugins.mode.device_lock import (
    device_lock,
    device_locks,
    devices_of,
    lock_of,
    physical_name,
)
from plugins.shared.clocks import RealClock
from tests.plugins.mode.mode_session import make_session

HOLD = """
import sys
from plugins.mode.device_lock import device_lock
with device_lock("cpu", wait=False):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def holder() -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock of the CPU."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_second_bench_fails_and_names_lock_and_holder(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    path = tmp_path / "tritium-bench-cpu.lock"
    with (
        pytest.raises(ConfigError, match=f"process {holder.pid} .{path}") as caught,
        device_lock("cpu", wait=False),
    ):
        pass
    assert "mode.lock=wait" in str(caught.value)


def test_other_device_is_free(holder: "subprocess.Popen[str]") -> None:
    with device_lock("cuda:1", wait=False):
        pass


def test_waiting_bench_starts_when_the_other_ends(
    holder: "subprocess.Popen[str]", capsys: pytest.CaptureFixture[str]
) -> None:
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    with device_lock("cpu", wait=True) as path:
        assert path.read_text() == f"{os.getpid()}\n"


def test_lock_dies_with_its_process(holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait()
    with device_lock("cpu", wait=False):
        pass


def test_lock_is_released_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), device_lock("cpu", wait=False):
        raise ZeroDivisionError
    with device_lock("cpu", wait=False):
        pass


def test_lock_file_serves_every_user(tmp_path: Path) -> None:
    with device_lock("cpu", wait=False) as path:
        assert path.stat().st_mode & 0o777 == 0o666


def test_every_device_of_an_engine_is_locked_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,1,3")
    runner = TorchRunner(tensor_parallel=2)
    session = make_session(tmp_path, clock=RealClock(), executor=runner)
    session.device = "cuda"
    with lock_of(session, "fail") as paths:
        assert [path.name for path in paths] == [f"tritium-bench-cuda-{n}.lock" for n in (1, 5)]
        for device in ("cuda:0", "cuda:1"):
            with (
                pytest.raises(ConfigError, match=f"{device} is in use by process {os.getpid()}"),
                device_lock(device, wait=False),
            ):
                pass
        with device_lock("cuda:2", wait=False):
            pass
    assert [path.read_text() for path in paths] == ["", ""]


def test_a_held_device_among_several_lets_the_others_go() -> None:
    devices = devices_of("cuda", 3)
    assert devices == ["cuda:0", "cuda:1", "cuda:2"]
    with device_lock("cuda:1", wait=False):
        with pytest.raises(ConfigError, match="cuda:1 is in use"), device_locks(devices, False):
            pass
        with device_locks(["cuda:2", "cuda:0"], wait=False):
            pass


def test_ranks_on_a_cpu_share_its_lock() -> None:
    assert devices_of("cpu", 4) == ["cpu"]
    assert devices_of("cuda:3", 1) == ["cuda:3"]


def test_devices_that_cannot_be_told_apart_are_locked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The executor refuses what is not there; a lock must not wait for itself."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with device_locks(devices_of("cuda", 2), wait=True) as paths:
        assert [path.name for path in paths] == ["tritium-bench-cuda-1.lock"]


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cpu", "0", "cpu"),
        ("cuda", "", "cuda-0"),
        ("cuda:1", "", "cuda-1"),
        ("cuda:0", "3,5", "cuda-3"),
        ("cuda:1", "GPU-ab/1,GPU-cd", "cuda-GPU-cd"),
    ],
)
def test_lock_is_named_by_the_physical_device(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str, name: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert physical_name(device) == name
