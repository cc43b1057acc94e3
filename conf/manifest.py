"""What a run must say to be repeated: commit, versions, machine, seed, command line."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from core.hookspecs import HOOK_VERSION

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pluggy",
    "hydra-core",
    "omegaconf",
    "wandb",
)
ROOT = Path(__file__).resolve().parent.parent


def manifest(
    device: str, seed: int, plugin_path: str | None, job: dict[str, Any]
) -> dict[str, Any]:
    """The facts known before a run starts. job: overrides, and its place in a sweep if any."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _dirty(),
        "hook_version": HOOK_VERSION,
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "device": device,
        "seed": seed,
        "plugin_path": plugin_path,
        "command": sys.argv,
        **job,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _dirty() -> bool | None:
    status = _git("status", "--porcelain")
    return None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    """Output of a git command in the clone, None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
