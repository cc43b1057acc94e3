"""Every file in conf/ composes, and names the arguments of the class it stands for."""

import inspect
import shlex
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf.compose import default_nodes, make_job, plugin_nodes, register
from conf.instantiate import build
from conf.overrides import ROOT, options, parse, prepare
from conf.schema import GROUPS
from core.errors import ConfigError
from core.hooks import Hooks

OPTIONAL = ("policy", "router", "sink", "kernel", "experiment")
NEEDED = {
    "model=hf": ["model.path=somewhere"],
    "workload=file": ["workload.path=trace.jsonl"],
    "workload=burstgpt": ["workload.path=BurstGPT_1.csv"],
    "workload=qwen_bailian": ["workload.path=qwen_coder_blksz_16.jsonl"],
    "mode=generate": ["prompt=Hello"],
    "mode=explain": ["run=outputs/some", "request=r-1"],
    "mode=replay": ["run=outputs/some"],
    "+experiment=engines": ["workload.path=trace.jsonl"],
    "+sink=kernels": ["records=full"],
}
CHOICES = {group: [f"{group}={name}" for name in options(group, [ROOT])] for group in GROUPS}
CHOICES |= {group: [f"+{group}={name}" for name in options(group, [ROOT])] for group in OPTIONAL}
EXPERIMENTS = CHOICES.pop("experiment")
# Row by row the next file of every group, until each was in one: composing costs 0.2 s.
ROWS = [
    [files[row % len(files)] for files in CHOICES.values()]
    for row in range(max(map(len, CHOICES.values())))
]
SWEEPS = sorted((ROOT.parent / "experiments").glob("*/*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def _hydra():
    register()
    with initialize_config_dir(str(ROOT), version_base="1.3"):
        yield


def composed(overrides: list[str]):
    config = compose("config", overrides, return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    return make_job(task, choices, {}, Path("/nowhere"))


def test_every_file_belongs_to_a_known_group():
    found = {file.parent.name for file in ROOT.glob("*/*.yaml")}
    assert found == {*GROUPS, *OPTIONAL}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-4])
def test_files_compose_and_build(row: list[str]):
    """Built, that is constructed: models and devices are loaded by build_* hooks, later."""
    job = composed([*row, *(value for choice in row for value in NEEDED.get(choice, []))])
    built = [
        {name: build(path, node) for name, (path, node) in nodes.items()}
        for nodes in (default_nodes(job), plugin_nodes(job))
    ]
    charge = Hooks(*built).in_charge()
    assert charge["build_executor"] == job.choices["executor"]
    assert set(job.policy.split("+")) <= set(charge.values())
    assert callable(build("mode", job.config["mode"]).run)
    assert callable(build("workload", job.config["workload"]).requests)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes_and_builds(experiment: str):
    job = composed([experiment, *NEEDED.get(experiment, [])])
    nodes = {**default_nodes(job), "workload": ("workload", job.config["workload"])}
    assert all(build(path, node) for path, node in nodes.values())


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("*/*.yaml")), ids=lambda file: "/".join(file.parts[-2:])
)
def test_file_lists_every_argument(file: Path):
    """So that each can be set without `+` and a typo is refused with near matches."""
    node = yaml.safe_load(file.read_text())
    if "@package _global_" in file.read_text():
        node = node.get(file.parent.name, {})
    if "_target_" not in node:
        return
    parameters = inspect.signature(resolve_name(node["_target_"])).parameters
    assert set(node) - {"_target_"} == set(parameters)


def test_config_lists_every_argument_of_what_stands_behind():
    job = composed([])
    for collection in ("defaults_behind", "sinks"):
        for node in job.config[collection].values():
            parameters = inspect.signature(resolve_name(node["_target_"])).parameters
            assert set(node) - {"_target_"} == set(parameters)


def test_groups_are_asked_before_what_stands_behind_and_null_leaves_one_out():
    job = composed(["mode=simulate", "defaults_behind.fitted=null", "sinks.console=null"])
    nodes = default_nodes(job)
    behind = [place.startswith(("defaults_behind.", "sinks.")) for place, _ in nodes.values()]
    assert behind == [True] * sum(behind) + [False] * 4  # batching, allocator, cache, executor
    assert {"fcfs", "simulated", "files"} <= nodes.keys()
    assert not {"fitted", "console"} & nodes.keys()


def test_two_plugins_of_one_name_are_refused_wherever_they_stand():
    job = composed(["+defaults_behind.chunked._target_=plugins.batching.static.Static"])
    text = "defaults_behind.chunked and batching name two plugins 'chunked'; rename one"
    with pytest.raises(ConfigError, match=text):
        default_nodes(job)


@pytest.mark.parametrize("group", ["policy", "router"])
def test_policies_have_one_flat_folder_and_go_by_their_file_names(group: str):
    for name in options(group, [ROOT]):
        first = (ROOT / group / f"{name}.yaml").read_text().splitlines()[0]
        assert first == f"# @package plugins.{name}"


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: "/".join(file.parts[-2:]))
def test_wandb_sweep_makes_a_command_line_that_composes(file: Path):
    sweep = yaml.safe_load(file.read_text())
    assert "${args_no_hyphens}" in sweep["command"]
    assert "+sink=wandb" in sweep["command"]
    assert sweep["command"][:3] == ["${env}", "python", sweep["program"]]
    for index in (0, -1):
        swept = [f"{key}={axis['values'][index]}" for key, axis in sweep["parameters"].items()]
        own = [part for part in sweep["command"][3:] if "$" not in part]
        arguments = prepare(shlex.split(" ".join([*own, *swept])))
        assert composed([override.input_line for override in parse(arguments)]).config["sinks"]
