"""Sweeps: all jobs run, failures are all told, what is done is not done again."""

import json
from pathlib import Path

import pytest


def summaries(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*/summary.json"))]


def job_of(folder: Path, policy: str, seed: int) -> Path:
    (found,) = folder.glob(f"{policy}-s{seed}-*")
    return found


def test_sweep_runs_every_combination_and_labels_it(probe, tmp_path):
    outcome = probe("-m", "seed=0,1", "+policy=evict_shortest,last_admitted", "hydra.sweep.dir=s")
    assert outcome.code == 0
    found = {(one["policy"], one["seed"]) for one in summaries(tmp_path / "s")}
    assert found == {(p, s) for p in ("evict_shortest", "last_admitted") for s in (0, 1)}
    for one in summaries(tmp_path / "s"):
        assert one["hooks"]["decide_preemption"] == one["policy"]
    last = job_of(tmp_path / "s", "last_admitted", 1)
    manifest = json.loads((last / "manifest.json").read_text())
    assert manifest["sweep"] == {"folder": "s", "position": 3}
    assert manifest["overrides"][-2:] == ["seed=1", "+policy=last_admitted"]


def test_sweep_tells_of_every_failure_and_runs_the_rest(probe, tmp_path):
    outcome = probe("-m", "engine.max_num_seqs=8,0,-1", "hydra.sweep.dir=s")
    assert outcome.code == 1
    report = outcome.err[outcome.err.index("2 failed") :]
    for value in (0, -1):
        assert f"engine.max_num_seqs={value}\n" in report
        assert f"engine.max_num_seqs must be >= 1, got {value}\n" in report
    assert len(summaries(tmp_path / "s")) == 1
    errors = [json.loads(file.read_text()) for file in (tmp_path / "s").glob("*/error.json")]
    assert {error["overrides"][-1] for error in errors} == {
        "engine.max_num_seqs=0",
        "engine.max_num_seqs=-1",
    }


def test_sweep_goes_on_after_a_fault_of_a_plugin(probe, tmp_path):
    outcome = probe("-m", "seed=0,1,2", "mode.fails_on_seed=1", "hydra.sweep.dir=s")
    assert outcome.code == 1
    assert "ZeroDivisionError: probe was told to fail" in outcome.err
    assert [one["seed"] for one in summaries(tmp_path / "s")] == [0, 2]
    error = json.loads((job_of(tmp_path / "s", "default", 1) / "error.json").read_text())
    assert "Traceback" in error["traceback"]


def test_sweep_again_skips_what_is_done_and_repeats_what_failed(probe, tmp_path):
    arguments = ("-m", "seed=0,1", "mode.fails_on_seed=1", "hydra.sweep.dir=s")
    assert probe(*arguments).code == 1
    done, failed = (job_of(tmp_path / "s", "default", seed) for seed in (0, 1))
    before = (done / "summary.json").stat().st_mtime_ns
    error = (failed / "error.json").stat().st_mtime_ns
    outcome = probe(*arguments)
    assert outcome.code == 1
    assert outcome.err.count("done before, skipped") == 1
    assert (done / "summary.json").stat().st_mtime_ns == before
    assert (failed / "error.json").stat().st_mtime_ns > error


def test_experiment_sweeps_its_own_axes_without_m(probe, tmp_path):
    outcome = probe("+experiment=continuous_vs_static", "seed=7", "hydra.sweep.dir=s")
    assert outcome.code == 0
    found = [(one["hooks"]["decide_batch"], one["seed"]) for one in summaries(tmp_path / "s")]
    assert sorted(found) == [("chunked", 7), ("static", 7)]


def test_experiment_takes_another_set_of_policies_one_from_outside_the_clone(probe, tmp_path):
    axes = ("seed=7", "engine.pool_tokens=4096", "+policy=mine,evict_shortest")
    outcome = probe("+experiment=victims", *axes, "hydra.sweep.dir=s")
    assert outcome.code == 0
    found = [(one["policy"], one["seed"]) for one in summaries(tmp_path / "s")]
    assert sorted(found) == [("evict_shortest", 7), ("mine", 7)]


def test_sweep_that_was_interrupted_tells_how_much_is_done(probe, tmp_path):
    arguments = ("-m", "seed=0,1,2", "+policy=mine", "hydra.sweep.dir=s")
    assert "already done" not in probe(*arguments).err
    (job_of(tmp_path / "s", "mine", 1) / "summary.json").unlink()
    assert "2 of 3 already done\n" in probe(*arguments).err
    assert "3 of 4 already done\n" in probe("-m", "seed=0,1,2,3", *arguments[2:]).err


def test_jobs_run_in_processes_of_their_own_under_joblib(probe, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason='pip install ".[sweep]"')
    launcher = ("hydra/launcher=cpu_joblib", "hydra.launcher.n_jobs=2")
    arguments = ("-m", "seed=0,1", "mode.fails_on_seed=1", "hydra.sweep.dir=s", *launcher)
    outcome = probe(*arguments)
    assert outcome.code == 1
    assert [one["seed"] for one in summaries(tmp_path / "s")] == [0]
    assert "ZeroDivisionError: probe was told to fail" in outcome.err
