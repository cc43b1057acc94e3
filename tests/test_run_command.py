"""`python run.py`: policies, folders and paths of a single run."""

import json
from pathlib import Path

import pytest

from core.errors import TritiumError


def only_run(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "outputs").iterdir()
    return folder


def summary(tmp_path: Path) -> dict:
    return json.loads((only_run(tmp_path) / "summary.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "label", "preempts", "orders"),
    [
        ((), "default", "last_admitted", "fcfs"),
        (("+policy=evict_shortest",), "evict_shortest", "evict_shortest", "fcfs"),
        (("+policy=last_admitted",), "last_admitted", "last_admitted", "fcfs"),
        (("+policy=[priority,random]",), "priority+random", "random", "priority"),
        (("+policy=mine",), "mine", "mine", "fcfs"),
        (("+plugins.my._target_=outside.Mine",), "my", "my", "fcfs"),
    ],
    ids=["default", "one", "the default named", "two hooks", "outside", "class alone"],
)
def test_policy_answers_its_hook(probe, tmp_path, arguments, label, preempts, orders):
    assert probe(*arguments).code == 0
    found = summary(tmp_path)
    assert found["policy"] == label
    assert found["hooks"]["decide_preemption"] == preempts
    assert found["hooks"]["decide_order"] == orders


def test_plugin_argument_is_set_from_the_command_line(probe, tmp_path):
    assert probe("+policy=mine", "plugins.mine.weight=3").code == 0
    assert summary(tmp_path)["weight"] == 3.0


def test_folder_holds_config_and_manifest(probe, plugin_folder, tmp_path):
    probe("seed=3", "name=try")
    manifest = json.loads((only_run(tmp_path) / "manifest.json").read_text())
    assert manifest["name"] == "try"
    assert manifest["seed"] == 3
    assert manifest["plugin_path"] == str(plugin_folder)
    assert manifest["hook_version"] >= 1
    assert manifest["versions"]["numpy"]
    assert manifest["hooks"]["build_allocator"] == "paged"
    assert (only_run(tmp_path) / "config.yaml").exists()


@pytest.mark.parametrize("extra", [(), ("hydra.job.chdir=true",)], ids=["stay", "chdir"])
@pytest.mark.parametrize("sweep", [False, True], ids=["run", "multirun"])
def test_relative_path_means_the_same_everywhere(command, tmp_path, sweep, extra):
    lines = [{"prompt_tokens": 5, "forced_output": 2}, {"prompt_tokens": 4, "forced_output": 1}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["executor=fake", "workload=file", "workload.path=./trace.jsonl", "progress=false"]
    flags = ["-m", "hydra.sweep.dir=outputs"] if sweep else []
    outcome = command(*flags, *arguments, "~sinks.figures", "~sinks.console", *extra)
    assert outcome.code == 0, outcome.err
    (found,) = (tmp_path / "outputs").glob("*/requests.csv")
    assert len(found.read_text().splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs", "trace.jsonl"]


def test_error_of_a_run_is_left_in_its_folder(probe, tmp_path):
    assert probe("engine.max_model_len=1").code == 1
    error = json.loads((only_run(tmp_path) / "error.json").read_text())
    assert error["message"] == "engine.max_model_len must be >= 2 or null, got 1"
    assert error["overrides"][-1] == "engine.max_model_len=1"


def test_full_error_keeps_the_traceback(probe, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(TritiumError, match="did you mean fcfs"):
        probe("+policy=FCFS")
