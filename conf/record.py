"""What a run writes about itself, whatever its sinks: config.yaml, manifest.json, error.json."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from core.errors import TritiumError
from plugins.shared.session import Session

ERROR = "error.json"
SUMMARY = "summary.json"


@contextmanager
def recorded(session: Session) -> Iterator[None]:
    """Write config and manifest before the run, the manifest again with what its parts added."""
    text = OmegaConf.to_yaml(OmegaConf.create(session.run.config))
    (session.folder / "config.yaml").write_text(text, encoding="utf-8")
    _write(session.folder / "manifest.json", _described(session))
    try:
        yield
    finally:
        _write(session.folder / "manifest.json", _described(session))


def write_error(folder: Path, overrides: list[str], error: BaseException) -> None:
    """error.json: what failed, with its overrides and its traceback."""
    entry = {
        "overrides": overrides,
        "type": type(error).__name__,
        "message": describe(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    _write(folder / ERROR, entry)


def describe(error: BaseException) -> str:
    """The error's message and its notes (which plugin, which hook); of others the type as well."""
    named = isinstance(error, (TritiumError, HydraException, OmegaConfBaseException))
    message = str(error) if named else f"{type(error).__name__}: {error}"
    return "\n".join([message, *getattr(error, "__notes__", [])])


def _described(session: Session) -> dict[str, Any]:
    run = session.run
    return {"name": run.name, "policy": run.policy, "hooks": run.hooks, **run.manifest}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
