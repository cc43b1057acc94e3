"""Whether a kernel variant compiles, found out without risk to this process.

A compiler that fails on an unusual variant may abort its process or never return. So the variant is
compiled in a child process with a time limit, which needs no device; the answer is kept in this
process and, per Triton version and source, in Triton's cache folder."""

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton

TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parent.parent

log = logging.getLogger(__name__)


def compiles(function: str, arguments: dict[str, Any], timeout_s: float = TIMEOUT_S) -> bool:
    """Whether `function` ("module:name") returns when called with `arguments` (JSON values) in a
    process of its own; a failure, crash or time-out is logged with its last line."""
    return _compiles(function, json.dumps(arguments, sort_keys=True), timeout_s)


@lru_cache(maxsize=256)
def _compiles(function: str, arguments: str, timeout_s: float) -> bool:
    file = _answer_file(function, arguments)
    if file.exists():
        return file.read_text() == "compiles"
    failure = _try(function, arguments, timeout_s)
    if failure is not None:
        log.warning("%s(%s) does not compile: %s", function, arguments, failure)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same answer at the same time: replace the file in one step.
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text("compiles" if failure is None else failure)
    part.replace(file)
    return failure is None


def _try(function: str, arguments: str, timeout_s: float) -> str | None:
    """None, or what went wrong."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.probe", function, arguments]
    try:
        child = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {timeout_s:g} s"
    if child.returncode == 0:
        return None
    lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return lines[-1]


def _answer_file(function: str, arguments: str) -> Path:
    module = function.partition(":")[0]
    # What the function imports lies beside it.
    folder = Path(ROOT, *module.split(".")).parent
    sources = [file.read_text() for file in sorted(folder.glob("*.py"))]
    parts = triton.__version__, function, arguments, *sources
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return Path(triton.knobs.cache.dir) / "probes" / digest


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))


if __name__ == "__main__":
    _main()
