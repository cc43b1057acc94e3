"""`python run.py mode=serve` in a process of its own, for experiments and tests."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 180.0
END_S = 60.0
FAKE = ("executor=fake", "engine.pool_tokens=65536", "mode.lock=off")  # no device is used
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """folder: of the run. fronts: process ids of its front ends."""

    url: str
    folder: Path
    process: "subprocess.Popen[bytes]"
    fronts: tuple[int, ...]

    @property
    def port(self) -> int:
        """On the loopback address."""
        return int(self.url.rpartition(":")[2])

    def engine(self) -> dict[str, Any]:
        """/v1/engine, at most `mode.report_s` old."""
        with urllib.request.urlopen(f"{self.url}/v1/engine", timeout=10) as answer:
            state: dict[str, Any] = json.load(answer)
        return state

    def wait_for(self, holds: Callable[[dict[str, Any]], bool], limit_s: float) -> float:
        """Seconds until `holds` of /v1/engine. Raises TimeoutError with the last state."""
        start_s = time.monotonic()
        while not holds(state := self.engine()):
            if time.monotonic() - start_s > limit_s:
                raise TimeoutError(f"after {limit_s:g} s: {shown(state)}")
            time.sleep(POLL_S)
        return time.monotonic() - start_s

    def rss_mib(self) -> tuple[float, ...]:
        """Resident memory: the engine's process, then each front end."""
        return tuple(_rss_mib(pid) for pid in (self.process.pid, *self.fronts))

    @property
    def messages(self) -> str:
        """What it wrote to standard error so far."""
        return (self.folder / "stderr").read_text(encoding="utf-8")


@contextlib.contextmanager
def serving(folder: Path, *overrides: str) -> Iterator[ServerProcess]:
    """A server on a free port, which SIGTERM ends. Raises RuntimeError with its messages if it does
    not start, or ends otherwise than with exit code 0."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mode=serve", "server.port=0", f"hydra.run.dir={folder}", *overrides]
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "run.py", *words],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        place = _wait_for_file(folder / "server.json", process)
        server = ServerProcess(place["url"], folder, process, tuple(place["front_ends"]))
        yield server
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(END_S)) != 0:
            raise RuntimeError(f"the server ended with exit code {code}: {server.messages}")
    finally:
        process.kill()
        process.wait()


def idle(state: dict[str, Any]) -> bool:
    """No request, and no page that one owns, in /v1/engine."""
    busy = state["requests"], state["running"], state["waiting"], state["pool"]["request"]
    return not any(busy)


def shown(state: dict[str, Any]) -> dict[str, Any]:
    """What of /v1/engine a message should tell."""
    return {name: state[name] for name in ("requests", "running", "waiting", "pool")}


def _wait_for_file(file: Path, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    until_s = time.monotonic() + START_S
    while not (file.is_file() and file.read_bytes().endswith(b"\n")):
        if process.poll() is not None or time.monotonic() > until_s:
            text = (file.parent / "stderr").read_text(encoding="utf-8")
            raise RuntimeError(f"the server did not start: {text}")
        time.sleep(POLL_S)
    place: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return place


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
