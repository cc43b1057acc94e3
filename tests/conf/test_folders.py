"""Folders of runs are new; those of a sweep's jobs follow the config."""

import pytest
from omegaconf import OmegaConf

from conf.folders import job_folder, jobs_at_once, new_folder


def named(**changes):
    config = {
        "seed": 1,
        "progress": True,
        "plugins": {},
        "engine": {"pool_tokens": 64},
        "hydra": {},
    }
    return job_folder(_root_=OmegaConf.create(config | changes))


def test_new_folder_never_exists_already(tmp_path):
    folders = {new_folder(str(tmp_path / "runs")) for _ in range(20)}
    assert len(folders) == 20
    assert {str(path) for path in (tmp_path / "runs").iterdir()} == folders


def test_new_folder_tries_again_when_its_name_is_taken(tmp_path, monkeypatch):
    names = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("conf.folders.secrets.token_hex", lambda _: next(names))
    first, second = new_folder(str(tmp_path)), new_folder(str(tmp_path))
    assert first.endswith("aaaa")
    assert first != second


def test_job_folder_is_the_same_for_the_same_config():
    assert named() == named(progress=False, hydra={"job": {"num": 3}})
    assert named().startswith("default-s1-")
    assert named(plugins={"sjf": {}, "fcfs": {}}).startswith("fcfs+sjf-s1-")


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"engine": {"pool_tokens": 65}}, {"plugins": {"fcfs": {"share": 1}}}]
)
def test_job_folder_differs_for_another_config(change):
    assert named(**change) != named()


def test_jobs_at_once_are_cores_over_threads(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert jobs_at_once("2") == 4
    assert jobs_at_once(3) == 2
    assert jobs_at_once(16) == 1
