"""Run folders as objects: what run.py wrote, read lazily."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from core.config import require
from core.errors import ConfigError

TEXT_COLUMNS = ("request_id", "client", "finish_reason", "error")
COMPLETED = ("stop", "length")
Column = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run. summary, config, manifest: its JSON and YAML files as plain values."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def policy(self) -> str:
        """The flat label of its policies."""
        return str(self.summary["policy"])

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.summary["seed"])

    @property
    def position(self) -> tuple[str, int]:
        """Sweep and place in it; runs outside a sweep come first."""
        sweep = self.summary.get("sweep") or {}
        return str(sweep.get("folder", "")), int(sweep.get("position", -1))

    @cached_property
    def requests(self) -> dict[str, Column]:
        """Columns of requests.csv in order of ending: text as str, all else float64, NaN = never
        happened. Raises ConfigError under records=summary."""
        path = self.file("requests.csv", "requests or full")
        with open(path, encoding="utf-8", newline="") as lines:
            reader = csv.reader(lines)
            names = next(reader)
            rows = list(reader)
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
        return {
            name: np.array(values, str) if name in TEXT_COLUMNS else _numbers(values)
            for name, values in zip(names, columns, strict=True)
        }

    @cached_property
    def tokens(self) -> dict[str, Column]:
        """Columns of tokens.npz; request is an index into `requests`."""
        with np.load(self.file("tokens.npz", "requests or full")) as arrays:
            return {name: arrays[name] for name in arrays.files}

    def steps(self) -> Iterator[dict[str, Any]]:
        """Lines of steps.jsonl, one at a time. A last line cut short by a crash is left out."""
        with open(self.file("steps.jsonl", "full"), encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)

    def file(self, name: str, records: str) -> Path:
        """A file of the folder. Raises ConfigError that says which `records` writes it."""
        path = self.folder / name
        rule = f"a run folder with {name} (records={records})"
        require(path.is_file(), "FOLDER", rule, str(self.folder))
        return path

    @cached_property
    def window(self) -> tuple[float, float]:
        """First and last arrival time that count, seconds (see `measure` in conf/settings.py)."""
        measured = self.summary.get("measured") or {}
        start, end = measured.get("from_s"), measured.get("to_s")
        return (-np.inf if start is None else start, np.inf if end is None else end)

    @cached_property
    def measured(self) -> NDArray[np.bool_]:
        """Which rows of `requests` arrived in the window that counts."""
        arrival_s = self.requests["arrival_s"]
        start, end = self.window
        return np.asarray((arrival_s >= start) & (arrival_s <= end), np.bool_)

    @cached_property
    def completed(self) -> NDArray[np.bool_]:
        """Which rows of `requests` count and ended with stop or length."""
        return np.asarray(self.measured & np.isin(self.requests["finish_reason"], COMPLETED))


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    """Finished runs in and below `folders`, and the folders of runs that never finished.

    Raises ConfigError for a folder that does not exist, or if there is no finished run at all.
    """
    done: dict[Path, Run] = {}
    unfinished: set[Path] = set()
    given = [Path(folder).expanduser() for folder in folders]
    for folder in given:
        require(folder.is_dir(), "FOLDER", "a folder of runs", str(folder))
        for config in sorted(folder.rglob("config.yaml")):
            path = config.parent
            if path.name == ".hydra":
                continue
            if (path / "summary.json").is_file():
                run = read_run(path)
                if "latency" in run.summary:  # other modes measure nothing
                    done[path.resolve()] = run
            else:
                unfinished.add(path)
    if not done:
        raise ConfigError(f"FOLDER must hold a finished run, got {', '.join(map(str, given))}")
    return sorted(done.values(), key=lambda run: (run.position, run.folder)), sorted(unfinished)


def read_run(folder: Path) -> Run:
    """The run of one folder."""
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(config, dict), "a run's config is a mapping"
    return Run(
        folder=folder,
        summary=json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        config={str(key): value for key, value in config.items()},
        manifest=json.loads((folder / "manifest.json").read_text(encoding="utf-8")),
    )


def select(values: Any, path: str) -> Any:
    """The value at a dotted path of nested dicts, None where there is none."""
    for key in path.split("."):
        if not isinstance(values, dict) or key not in values:
            return None
        values = values[key]
    return values


def numbers(runs: Iterable[Run], path: str, scale: float = 1.0) -> list[float]:
    """The number at a dotted path of each run's summary, times `scale`."""
    return [scale * float(select(run.summary, path)) for run in runs]


def _numbers(values: Iterable[str]) -> NDArray[np.float64]:
    return np.array([float(value) if value else np.nan for value in values], np.float64)
