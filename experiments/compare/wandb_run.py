"""A comparison as one more run in the sweep's group of Weights & Biases: the table and the plot."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.compare.report import HEADER
from plugins.sink.wandb_sink import start_run


def log_comparison(
    rows: Sequence[tuple[Any, ...]], out: Path, project: str, group: str | None
) -> None:
    """Log `differences` (a table), `pareto` (out's picture) and the report's text.

    Online if there are credentials and a server, else offline in out/wandb, as `+sink=wandb` does;
    WANDB_MODE decides if set."""
    import wandb  # takes seconds

    options = {
        "project": project,
        "group": group,
        "name": "compare",
        "job_type": "compare",
        "dir": str(out),
        "reinit": "create_new",
    }
    run = start_run(options, os.environ.get("WANDB_MODE"))
    table = wandb.Table(columns=list(HEADER), data=[list(row) for row in rows])
    picture = wandb.Image(str(out / "pareto.png"))
    run.log({"differences": table, "pareto": picture})
    run.summary["report"] = (out / "compare.md").read_text(encoding="utf-8")
    run.finish()
