"""Hydra callback: announces the jobs of a sweep and reports every failure at its end."""

import json
import sys
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.folders import register_resolvers
from conf.record import ERROR, SUMMARY


class SweepReport(Callback):
    """Reads failures from the jobs' folders: launchers may run jobs in processes of their own."""

    def __reduce__(self) -> Any:
        """A launcher hands it to each of those: what they compose with must be known there too."""
        return _in_another_process, ()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Forget the failures of an earlier try, which run again; tell what of it is done."""
        folder = Path(config.hydra.sweep.dir)
        for file in folder.glob(f"*/{ERROR}"):
            file.unlink()
        done = [file.parent for file in folder.glob(f"*/{SUMMARY}")]
        jobs = planned(config) if done else None
        if jobs:
            before = sum(_overrides(path) in jobs for path in done)
            sys.stderr.write(f"{before} of {len(jobs)} already done\n")

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


def planned(config: DictConfig) -> list[list[str]] | None:
    """The overrides of each job of a sweep, as its folder's .hydra/overrides.yaml has them; None
    where a sweeper other than Hydra's own decides as it goes."""
    sweeper = config.hydra.sweeper
    if not sweeper["_target_"].endswith(f".{BasicSweeper.__name__}"):
        return None
    given = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*given, *config.hydra.overrides.task])
    batches = BasicSweeper.split_arguments(overrides, None)
    return [job for batch in batches for job in batch]


def _overrides(folder: Path) -> list[str]:
    file = folder / ".hydra" / "overrides.yaml"
    return list(OmegaConf.load(file)) if file.is_file() else []


def _in_another_process() -> SweepReport:
    register_resolvers()
    return SweepReport()
