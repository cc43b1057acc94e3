"""Hydra callback: announces the jobs of a sweep and reports every failure at its end."""

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import filter_overrides
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.record import ERROR


class SweepReport(Callback):
    """Reads failures from the jobs' folders: launchers may run jobs in processes of their own."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Forget the failures of an earlier try: what failed runs again."""
        for file in Path(config.hydra.sweep.dir).glob(f"*/{ERROR}"):
            file.unlink()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """One line a job."""
        if config.hydra.mode == RunMode.MULTIRUN:
            overrides = " ".join(filter_overrides(config.hydra.overrides.task))
            sys.stderr.write(f"job {config.hydra.job.num}: {overrides}\n")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """List all failures with their overrides and exit with 1; Hydra tells of the first."""
        folder = Path(config.hydra.sweep.dir)
        failed = sorted(folder.glob(f"*/{ERROR}"))
        sys.stderr.write(f"sweep: {folder}\n")
        if not failed:
            return
        sys.stderr.write(
            f"{len(failed)} failed; the same command with hydra.sweep.dir={folder} reruns them:\n"
        )
        for file in failed:
            entry = json.loads(file.read_text(encoding="utf-8"))
            sys.stderr.write(f"  {' '.join(filter_overrides(entry['overrides']))}\n")
            sys.stderr.write(f"    {entry['message'].splitlines()[0]}\n    {file}\n")
        raise SystemExit(1)  # not an Exception: Hydra turns those of a callback into warnings
