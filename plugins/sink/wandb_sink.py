"""Runs in Weights & Biases, online or offline: config, summary, step series, figures, requests
table."""

import os
import re
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import wandb
from matplotlib.figure import Figure
from PIL import Image
from wandb.errors import AuthenticationError, CommError, UsageError

from core.config import require
from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.records import RequestRecord, StepRecord
from plugins.shared.run_info import RunInfo, SinkQuery
from plugins.sink.figures import figure_title
from plugins.sink.plots import latency_figure, memory_figure
from plugins.sink.rows import REQUEST_COLUMNS, request_row
from plugins.sink.series import Series, StepSeries

MODES = ("online", "offline", "disabled", None)
MAX_POINTS = 1000  # of the step series
MAX_TABLE_ROWS = 10_000
INIT_TIMEOUT_S = 30.0
ILLEGAL = re.compile(r"[^0-9A-Za-z_.-]+")


class Wandb:
    """One wandb run for each run of ours, also when a sweep does many in one process.

    project, entity, tags: as in wandb. mode: online, offline or disabled; null: online if there are
    credentials and the server answers, else offline with one warning; it never asks for a key.
    group: null = the sweep's id under an agent, else the sweep folder's name, else none.
    name: null = the job's folder in a sweep, else the run's name. Everything is logged when the run
    is over, so it costs the run nothing; offline runs go to the run folder: `wandb sync
    FOLDER/wandb/offline-run-*` sends them later.
    """

    def __init__(
        self,
        project: str = "tritium",
        entity: str | None = None,
        mode: str | None = None,
        group: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        require(mode in MODES, "wandb.mode", "online, offline, disabled or null", mode)
        self.project = project
        self.entity = entity
        self.mode = mode
        self.group = group
        self.name = name
        self.tags = tags or []

    @hookimpl
    def build_sink(self, query: SinkQuery) -> "WandbSink":
        """Start the wandb run. Raises ConfigError if mode=online cannot be had."""
        folder = Path(query.folder)
        sweep = (query.run.manifest.get("sweep") or {}).get("folder")
        options = {
            "project": self.project,
            "entity": self.entity,
            "group": self.group or os.environ.get("WANDB_SWEEP_ID") or sweep,
            "name": self.name or (folder.name if sweep else query.run.name),
            "tags": self.tags,
            "config": run_config(query.run),
            "dir": str(folder),
            "reinit": "create_new",
        }
        return WandbSink(start_run(options, self.mode or os.environ.get("WANDB_MODE")))


class WandbSink:
    """Gathers a bounded series of steps and the ended requests; logs them at the end."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._series = StepSeries(MAX_POINTS)
        self._records: list[RequestRecord] = []

    def step(self, record: StepRecord) -> None:
        """Take one step into the series."""
        self._series.add(record)

    def request(self, record: RequestRecord) -> None:
        """Keep one ended request."""
        self._records.append(record)

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Log series, figures, table and summary, then finish this wandb run and no other."""
        series = self._series.read()
        self._log_series(series)
        self._log_figures(series, figure_title(run))
        table = wandb.Table(columns=list(REQUEST_COLUMNS))
        for record in self._records[:MAX_TABLE_ROWS]:
            table.add_data(*request_row(record))
        self._run.log({"requests": table})
        self._run.config.update(flatten({"manifest": run.manifest}), allow_val_change=True)
        self._run.summary.update(flatten(summary))
        self._run.finish()

    def fail(self, error: BaseException) -> None:
        """The run broke: mark it as failed."""
        self._run.summary.update({"error": f"{type(error).__name__}: {error}"})
        self._run.finish(exit_code=1)

    def _log_series(self, series: Series) -> None:
        self._run.define_metric("steps/time_s")
        self._run.define_metric("steps/*", step_metric="steps/time_s")
        for index, time_s in enumerate(series.edges_s[1:].tolist()):
            point = {"steps/time_s": time_s}
            for columns in (series.levels, series.counts):
                point |= {f"steps/{name}": float(column[index]) for name, column in columns.items()}
            self._run.log(point)

    def _log_figures(self, series: Series, title: str) -> None:
        figures = {"figures/latency": latency_figure(self._records, title)}
        if len(series.edges_s) > 1:
            figures["figures/memory"] = memory_figure(series, title)
        self._run.log({name: wandb.Image(_bitmap(figure)) for name, figure in figures.items()})


def run_config(run: RunInfo) -> dict[str, Any]:
    """The resolved config, flat, with the plugin behind each hook and the policy's label."""
    own = {"seed": run.seed, "policy": run.policy, "hooks": run.hooks}
    return flatten({**run.config, **own})


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots, lists kept whole.

    Keys are made legal: runs of other characters than letters, digits, `_`, `.` and `-` become one
    `_`, and underscores at the ends go (`+experiment` -> experiment, `_target_` -> target).
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + ILLEGAL.sub("_", str(key)).strip("_")
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _bitmap(figure: Figure) -> Image.Image:
    """wandb would draw a Figure through pyplot, which is global state."""
    png = BytesIO()
    figure.savefig(png)
    return Image.open(png)


def start_run(options: dict[str, Any], mode: Any) -> Any:
    """wandb.init(**options). mode: as of Wandb, with its fall-back and its ConfigError."""
    settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S)
    if mode is None:
        if not wandb.login(prompt=False, verify=False):
            return _offline(options, settings, "no API key (see `wandb login`)")
        try:
            return wandb.init(**options, mode="online", settings=settings)
        except (AuthenticationError, CommError, UsageError) as error:
            return _offline(options, settings, str(error))
    try:
        return wandb.init(**options, mode=mode, settings=settings)
    except (AuthenticationError, CommError, UsageError) as error:
        raise ConfigError(
            f"wandb.mode={mode} needs a reachable server and a key: {error}"
        ) from None


def _offline(options: dict[str, Any], settings: Any, reason: str) -> Any:
    warnings.warn(
        f"wandb goes on offline: {reason}; `wandb sync` sends the run later", stacklevel=2
    )
    return wandb.init(**options, mode="offline", settings=settings)
