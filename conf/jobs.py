"""Runs jobs: errors become one message each, and one failed job of a sweep harms no other."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf.compose import register
from conf.errors import readable
from conf.overrides import may_set_mode, prepare
from conf.record import ERROR, SUMMARY, describe, write_error
from conf.reuse import REUSE
from core.errors import TritiumError

Summary = dict[str, Any]
FULL_ERROR = "HYDRA_FULL_ERROR"
MENDABLE = (TritiumError, HydraException, OmegaConfBaseException)


def command_line(job: Callable[[], Any]) -> int:
    """Let Hydra run `job` for the process's command line; returns the exit code.

    1 with one message for whatever a user can mend. Faults of a plugin keep their traceback, and so
    does everything under HYDRA_FULL_ERROR=1.
    """
    before, get_mode = os.environ.get(FULL_ERROR, "0"), Hydra.get_mode
    os.environ[FULL_ERROR] = "1"  # Hydra hands its errors to us instead of printing them
    try:
        register()
        sys.argv[1:] = prepare(sys.argv[1:])
        if not may_set_mode(sys.argv[1:]):
            # It composes the config a first time to read this alone.
            Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
        job()
    except MENDABLE as error:
        if before == "1":
            raise
        sys.stderr.write(_message(error, sys.argv[1:]) + "\n")
        return 1
    finally:
        os.environ[FULL_ERROR], Hydra.get_mode = before, get_mode  # type: ignore[method-assign]
    return 0


def guarded(
    run: Callable[[DictConfig], dict[str, Any]], config: DictConfig
) -> dict[str, Any] | None:
    """Run a job; returns its summary.

    In a sweep a failed job returns None (conf/callbacks.py reports it at the end), and a job that
    has its summary already is not run again. Outside a sweep errors propagate, those that a user
    can mend as CompactHydraException.
    """
    hydra = HydraConfig.get()
    folder, overrides = Path(hydra.runtime.output_dir), list(hydra.overrides.task)
    os.chdir(hydra.runtime.cwd)  # relative paths mean the same whatever hydra.job.chdir says
    (folder / ERROR).unlink(missing_ok=True)
    in_sweep = hydra.mode == RunMode.MULTIRUN
    REUSE.active |= in_sweep
    if in_sweep and (folder / SUMMARY).exists():
        sys.stderr.write(f"done before, skipped: {folder}\n")
        summary: Summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return summary
    try:
        return run(config)
    except Exception as error:
        REUSE.forget()
        write_error(folder, overrides, error)
        if in_sweep:
            sys.stderr.write(f"failed: {_message(error, overrides)}\n")
            return None
        if isinstance(error, MENDABLE):
            raise CompactHydraException(_message(error, overrides)) from error
        raise


def _message(error: BaseException, overrides: list[str]) -> str:
    composing = isinstance(error, MENDABLE) and not isinstance(error, TritiumError)
    translated = type(error) is CompactHydraException
    return readable(error, overrides) if composing and not translated else describe(error)
