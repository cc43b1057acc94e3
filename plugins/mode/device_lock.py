"""One engine in real time on a device, or on each that it needs: two would measure each other."""

import fcntl
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from core.config import require
from core.errors import ConfigError
from plugins.shared.clocks import RealClock
from plugins.shared.session import Session

LOCKS = ("fail", "wait", "off")


def check_lock(lock: str) -> None:
    """Raises ConfigError unless it is one of LOCKS."""
    require(lock in LOCKS, "mode.lock", f"one of {', '.join(LOCKS)}", lock)


def lock_of(session: Session, lock: str) -> AbstractContextManager[Any]:
    """The locks of the session's devices: fail at once if one is held, wait for it, or off. Under a
    virtual clock nothing runs on a device, and nothing is locked."""
    if lock == "off" or not isinstance(session.clock, RealClock):
        return nullcontext()
    return device_locks(devices_of(session.device, num_devices(session)), lock == "wait")


def num_devices(session: Session) -> int:
    """Devices that compute together in its engine, by the executor's plugin: `tensor_parallel`."""
    hooks = session.hooks
    plugin = hooks.registered[hooks.in_charge()["build_executor"]].plugin
    return int(getattr(plugin, "tensor_parallel", 1))


def devices_of(device: str, count: int) -> list[str]:
    """Of an engine on `count` of them: device r for rank r; on a CPU all ranks are on that one."""
    kind = device.partition(":")[0]
    return [device] if count == 1 or kind == "cpu" else [f"{kind}:{rank}" for rank in range(count)]


@contextmanager
def device_locks(devices: Sequence[str], wait: bool) -> Iterator[list[Path]]:
    """Hold device_lock of each, in one order for all processes: none waits for one that waits for
    it, whatever order its devices are visible in."""
    by_name = {physical_name(device): device for device in devices}
    with ExitStack() as stack:
        locks = [device_lock(by_name[name], wait) for name in sorted(by_name)]
        yield [stack.enter_context(lock) for lock in locks]


@contextmanager
def device_lock(device: str, wait: bool) -> Iterator[Path]:
    """Hold the device's lock file, `tritium-bench-<device>.lock` in the temporary folder.

    The kernel drops the lock with the process, however that ends. wait: queue behind the holder,
    saying so on standard error, instead of raising ConfigError that names the file and the holder's
    process id.
    """
    path = Path(tempfile.gettempdir()) / f"tritium-bench-{physical_name(device)}.lock"
    descriptor = _open(path)
    try:
        _acquire(descriptor, path, device, wait)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield path
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def physical_name(device: str) -> str:
    """A file-name part for the device itself: cuda:0 of a process that sees only GPU 3 is GPU 3."""
    kind, _, index = device.partition(":")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = int(index or 0)
    if kind == "cuda" and number < len(visible):
        index = visible[number]
    elif kind == "cuda":
        index = str(number)
    return re.sub(r"[^0-9A-Za-z-]+", "-", f"{kind}-{index}".strip("-"))


def _open(path: Path) -> int:
    """Open or create it for every user. An existing file is opened without O_CREAT, which Linux
    refuses for another user's file in a shared folder."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.chmod(path, 0o666)  # whatever the umask says
        return descriptor
    except PermissionError:
        raise ConfigError(f"mode.lock needs {path} to be writable; remove it or use off") from None


def _acquire(descriptor: int, path: Path, device: str, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
    text = f"{device} is in use by process {holder} ({path})"
    if not wait:
        raise ConfigError(f"{text}: wait for it, or set mode.lock=wait")
    sys.stderr.write(f"{text}: waiting\n")
    fcntl.flock(descriptor, fcntl.LOCK_EX)
