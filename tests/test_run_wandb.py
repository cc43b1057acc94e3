"""`+sink=wandb`: sweeps and agents, offline, with the files that `wandb sync` would send."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.plugins.sink.wandb_file import of_kind, records

ROOT = Path(__file__).resolve().parent.parent
SWEEP = ROOT / "experiments" / "goodput" / "wandb_sweep.yaml"
SMALL = ("executor=fake", "workload.num_requests=3", "~sinks.console", "~sinks.figures")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_SWEEP_ID", "WANDB_RUN_GROUP", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))


def read(folder: Path) -> list:
    (run,) = (folder / "wandb").glob("offline-run-*")
    return records(run)


def last_values(items) -> dict:
    """Key -> value of `update` entries; a nested key as a dotted path."""
    return {".".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items}


def test_jobs_of_a_sweep_are_one_group_with_table_figures_and_summary(command, tmp_path):
    sweep = ("-m", "seed=0,1", "hydra.sweep.dir=s", "workload=synthetic", "+sink=wandb")
    assert command(*sweep, *SMALL).code == 0
    folders = sorted(path.parent for path in tmp_path.glob("s/*/summary.json"))
    assert len(folders) == 2
    for folder in folders:
        found = read(folder)
        (run,) = of_kind(found, "run")
        assert (run.run_group, run.display_name, run.project) == ("s", folder.name, "tritium")
        history = {}
        for record in of_kind(found, "history"):
            history |= last_values(record.item)
        assert {"steps/time_s", "steps/batch"} <= history.keys()
        assert (history["requests._type"], history["requests.nrows"]) == ("table-file", 3)
        assert history["figures/latency._type"] == "image-file"
        files = {one.path for record in of_kind(found, "files") for one in record.files}
        assert history["requests.path"] in files
        assert any(path.startswith("media/images/figures") for path in files)
        (local,) = (folder / "wandb").glob("offline-run-*")
        assert all((local / "files" / path).is_file() for path in files if "media" in path)
        summary = {}
        for record in of_kind(found, "summary"):
            summary |= last_values(record.update)
        own = json.loads((folder / "summary.json").read_text())
        assert summary["latency.ttft_s.p50"] == own["latency"]["ttft_s"]["p50"]
        assert summary["requests.completed"] == 3
        assert [one.exit_code for one in of_kind(found, "exit")] == [0]


def test_command_of_an_agent_runs_with_its_parameter_file(tmp_path, monkeypatch):
    """What `wandb agent` does: a process a run, parameters in a file that the environment names,
    and on the command line in the place of ${args_no_hyphens}."""
    sweep = yaml.safe_load(SWEEP.read_text())
    chosen = {key: axis["values"][-1] for key, axis in sweep["parameters"].items()}
    parameters = tmp_path / "config.yaml"
    parameters.write_text(yaml.safe_dump({key: {"value": value} for key, value in chosen.items()}))
    monkeypatch.setenv("WANDB_SWEEP_ID", "ab12cd34")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(parameters))
    command = [sys.executable, str(ROOT / "run.py")]
    for part in sweep["command"][3:]:
        given = [f"{key}={value}" for key, value in chosen.items()]
        command += given if part == "${args_no_hyphens}" else [part]
    done = subprocess.run(
        [*command, *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    found = read(folder)
    runs = of_kind(found, "run")
    assert {(run.run_group, run.sweep_id) for run in runs} == {("ab12cd34", "ab12cd34")}
    config = last_values(item for run in runs for item in run.config.update)
    assert config["seed"] == chosen["seed"]
    assert config["policy"] == json.loads((folder / "summary.json").read_text())["policy"]
    assert [one.exit_code for one in of_kind(found, "exit")] == [0]
