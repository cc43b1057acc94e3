"""mode=replay: a run repeats itself, another policy is told apart, what cannot be is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from plugins.mode.replay import RUN, Replay, kept, merged
from tests.plugins.mode.mode_session import make_session

COMMAND = [
    "mode=simulate",
    "workload.num_requests=24",
    "engine.pool_tokens=1024",
    "engine.max_model_len=512",
    "+policy=last_admitted",
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    quiet = ["progress=false", "~sinks.figures", f"hydra.run.dir={folder}"]
    command = [sys.executable, str(RUN), *COMMAND, *quiet]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def replayed(folder: Path, run: Path, *overrides: str) -> dict[str, Any]:
    session = make_session(folder)
    given = ["mode=replay", f"run={run}", *overrides]
    manifest = session.run.manifest | {"overrides": given}
    session.run = replace(session.run, manifest=manifest)
    return Replay(str(run)).run(session)


def test_run_repeats_itself_and_another_policy_differs_with_both_reasons(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = replayed(tmp_path, recorded, "+policy=evict_shortest")
    summary = json.loads((recorded / "summary.json").read_text())
    assert found["reproduced"]
    assert found["steps"] == summary["steps"]["count"]
    assert summary["preemptions"] > 0, "the pool was to be too small"
    told = "\n".join(found["difference"])
    assert "by last_admitted: admitted last" in told
    assert "by evict_shortest: fewest generated" in told
    again, other = found["totals"]["preemptions"]
    assert again == summary["preemptions"]
    decided = json.loads((tmp_path / "other" / "summary.json").read_text())
    assert decided["policy"] == "evict_shortest"
    assert decided["preemptions"] == other
    out = capsys.readouterr().out
    assert "repeated with the recorded decisions" in out
    assert "changed: +policy=evict_shortest" in out


def test_run_that_was_recorded_otherwise_is_told(recorded: Path, tmp_path: Path):
    """A record of another decision: as if the code had changed since."""
    own = tmp_path / "own"
    shutil.copytree(recorded, own)
    lines = (own / "steps.jsonl").read_text().splitlines()
    step = json.loads(lines[3])
    step["rows"][0][2] += 1
    lines[3] = json.dumps(step)
    (own / "steps.jsonl").write_text("\n".join(lines) + "\n")
    found = replayed(tmp_path, own)
    assert not found["reproduced"]
    assert found["reproduction"][0] == "Decisions differ from step 4 on."
    assert "difference" not in found


def test_command_line_that_means_something_else_by_now_is_refused(recorded: Path, tmp_path: Path):
    own = tmp_path / "own"
    shutil.copytree(recorded, own)
    text = (own / "config.yaml").read_text()
    (own / "config.yaml").write_text(text.replace("slice_tokens: 256", "slice_tokens: 99"))
    assert "slice_tokens: 99" in (own / "config.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"still gives its config.yaml, got .*whose batching diff"
    ):
        replayed(tmp_path, own)


def test_run_in_real_time_and_one_without_steps_are_refused(recorded: Path, tmp_path: Path):
    own = tmp_path / "own"
    shutil.copytree(recorded, own)
    text = (own / "config.yaml").read_text()
    (own / "config.yaml").write_text(text.replace("replicas: 1", "replicas: 2"))
    with pytest.raises(ConfigError, match="run must be of one engine: steps of replicas are not"):
        replayed(tmp_path, own)
    (own / "config.yaml").write_text(text.replace("clock: virtual", "clock: real"))
    with pytest.raises(ConfigError, match="run must be a run in simulated time"):
        replayed(tmp_path, own)
    (own / "steps.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"finished run with steps.jsonl \(records=full\)"):
        replayed(tmp_path, own)
    with pytest.raises(ConfigError, match="run must be the folder of a run"):
        replayed(tmp_path, tmp_path / "nowhere")


def test_changes_replace_what_they_name_and_the_settings_under_it():
    given = ["seed=1", "+policy=sjf", "plugins.sjf.x=2", "batching=static", "batching.size=4"]
    assert merged(given, ["+policy=srtf", "seed=2"]) == [
        "batching=static",
        "batching.size=4",
        "+policy=srtf",
        "seed=2",
    ]
    assert merged(given, ["batching=chunked"])[:3] == ["seed=1", "+policy=sjf", "plugins.sjf.x=2"]


def test_what_decides_nothing_is_not_repeated():
    given = ["mode=replay", "run=x", "+sink=wandb", "~sinks.figures", "hydra.run.dir=y", "seed=1"]
    assert kept([*given, "records=summary", "mode=simulate"]) == ["seed=1", "mode=simulate"]
