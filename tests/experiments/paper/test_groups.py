"""experiments/paper/groups.py and folders.py: what is one setting, and what is compared."""

import pytest

from core.errors import ConfigError
from experiments.paper.folders import find_runs
from experiments.paper.groups import arrange
from tests.experiments.paper.run_folders import request, write_run


def test_runs_are_grouped_by_setting_then_policy_then_seed(tmp_path):
    for rate in (8, 2):
        for policy in ("a", "b"):
            for seed in (0, 1):
                config = {"workload": {"rate": rate, "num": 4}, "name": f"{policy}{seed}"}
                write_run(tmp_path, policy, seed, config=config)
    runs, unfinished = find_runs([tmp_path])
    groups = arrange(runs)
    assert unfinished == []
    assert [group.setting for group in groups] == ["workload.rate=2", "workload.rate=8"]
    assert all(set(group.runs) == {"a", "b"} for group in groups)
    assert all(set(seeds) == {0, 1} for group in groups for seeds in group.runs.values())


def test_variants_of_one_policy_are_told_apart_by_their_arguments(tmp_path):
    for quantum in (1, 2):
        plugins = {"mlfq": {"_target_": "x.Mlfq", "quantum": quantum, "levels": 3}}
        write_run(tmp_path, "mlfq", config={"plugins": plugins})
    write_run(tmp_path, "fcfs")
    (group,) = arrange(find_runs([tmp_path])[0])
    assert set(group.runs) == {"mlfq (quantum=1)", "mlfq (quantum=2)", "fcfs"}


def test_any_config_path_can_be_what_is_compared(tmp_path):
    for name, size in (("Paged", 16), ("Paged", 32), ("Contiguous", 16)):
        node = {"_target_": f"plugins.{name}", "page_size": size}
        write_run(tmp_path, config={"allocator": node})
    (group,) = arrange(find_runs([tmp_path])[0], ["allocator"])
    assert set(group.runs) == {"Paged (page_size=16)", "Paged (page_size=32)", "Contiguous"}
    (group, _) = arrange(find_runs([tmp_path])[0][:2], ["plugins"])
    assert list(group.runs) == ["default"]


def test_two_runs_of_the_same_are_refused(tmp_path):
    write_run(tmp_path, "a", 3)
    write_run(tmp_path, "a", 3)
    with pytest.raises(ConfigError, match="FOLDER must hold one run of a, seed 3; there are"):
        arrange(find_runs([tmp_path])[0])


def test_unfinished_runs_are_told_and_other_modes_left_out(tmp_path):
    write_run(tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.yaml").write_text("seed: 0\n")
    told = write_run(tmp_path, "explain")
    (told.folder / "summary.json").write_text('{"mode": "explain"}')
    runs, unfinished = find_runs([tmp_path])
    assert [run.policy for run in runs] == ["default"]
    assert unfinished == [broken]


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_folder_without_runs_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="FOLDER must"):
        find_runs([tmp_path / name])


def test_requests_outside_the_window_do_not_count(tmp_path):
    rows = [request("b", 5.0), request("a", 0.0), request("c", 9.0, finish_reason="abort")]
    run = write_run(tmp_path, requests=rows, summary={"measured": {"from_s": 1.0, "to_s": None}})
    assert run.measured.tolist() == [True, False, True]
    assert run.completed.tolist() == [True, False, False]
