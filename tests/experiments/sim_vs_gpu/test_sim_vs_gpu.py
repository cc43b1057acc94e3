"""experiments/sim_vs_gpu: its figures by hand, and a dry run with a model in the device's place."""

from pathlib import Path
from typing import Any

import pytest

from conf.overrides import prepare
from core.errors import ConfigError
from experiments.sim_vs_gpu import cells as cells_module
from experiments.sim_vs_gpu.cells import POLICIES, WORKLOADS, cells
from experiments.sim_vs_gpu.report import Ranking, error, find_pairs, main, rank, rank_all
from experiments.sim_vs_gpu.run import command
from experiments.sim_vs_gpu.run import main as run_cells

SPEED = "throughput.output_tokens_per_s"
SMALL = ["executor=simulated", "executor.step_time.model=qwen3_0_6b"]


def test_cells_cover_everything_once_policies_next_to_each_other():
    every = list(cells(["conv"], ["default", "sjf"], [0, 1]))
    assert [cell.folder for cell in every] == [
        "conv/default-s0",
        "conv/sjf-s0",
        "conv/default-s1",
        "conv/sjf-s1",
    ]
    assert "workload.start=1000" in every[3].overrides
    assert "+policy=[sjf,oracle]" in every[3].overrides
    assert "seed=1" in every[3].overrides


def test_command_puts_the_overrides_of_the_side_last():
    cell = next(cells(["conv"], ["default"], [3]))
    line = command("simulated", cell, Path("/x"), ["executor.step_time.model=qwen3_0_6b"])
    assert line[:2] == ["run.py", "mode=simulate"]
    assert "hydra.run.dir=/x" in line
    assert line[-1] == "executor.step_time.model=qwen3_0_6b"


def test_error_is_relative_to_the_device():
    assert error((2.0, 3.0)) == 0.5
    assert error((2.0, 1.0)) == 0.5
    assert error((0.0, 0.0)) == 0.0
    assert error((0.0, 1.0)) == float("inf")


def over(*pairs: tuple[float, float]) -> dict[int, tuple[float, float]]:
    return dict(enumerate(pairs))


def test_only_pairs_that_the_device_tells_apart_are_ranked():
    """b is clearly above a on the device, c is not; the simulation has b above a as well."""
    values = {
        "a": over((1.0, 10.0), (1.1, 10.0), (0.9, 10.0)),
        "b": over((2.0, 11.0), (2.1, 11.0), (1.9, 11.0)),
        "c": over((0.0, 99.0), (3.0, 99.0), (1.5, 99.0)),
    }
    assert rank(values) == Ranking(concordant=1)
    swapped = values | {"b": over((2.0, 9.0), (2.1, 9.0), (1.9, 9.0))}
    assert rank(swapped) == Ranking(discordant=1)
    equal = values | {"b": over((2.0, 10.0), (2.1, 10.0), (1.9, 10.0))}
    assert rank(equal) == Ranking(tied=1)


def test_one_seed_tells_nothing_apart():
    assert rank({"a": over((1.0, 1.0)), "b": over((9.0, 9.0))}) == Ranking()


def test_tau_b_needs_ten_pairs_and_counts_ties_once():
    assert Ranking(9, 0).tau_b is None
    assert Ranking(10, 0).tau_b == 1.0
    assert Ranking(0, 10).tau_b == -1.0
    assert Ranking(9, 3).tau_b == pytest.approx(6 / 12)
    assert Ranking(9, 3, 4).tau_b == pytest.approx(6 / (16 * 12) ** 0.5)
    assert Ranking(0, 0, 20).tau_b is None


def test_dry_run_compares_a_model_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    small = {"small": ("workload=synthetic", "workload.num_requests=16", "workload.rate=500")}
    monkeypatch.setattr(cells_module, "WORKLOADS", small)
    monkeypatch.setattr(
        cells_module, "ENGINE", ("engine.pool_tokens=1024", "engine.max_model_len=512")
    )
    chosen = ["--workloads", "small", "--policies", "default", "--seeds", "0"]
    device, other = " ".join(SMALL), "executor.step_time.model=llama_8b"
    arguments = [str(tmp_path), *chosen, "--device", device, "--simulated", other]
    assert run_cells(arguments) == 0
    assert run_cells(arguments) == 0, "what is there is not run again"
    assert capsys.readouterr().out.count("done") == 2
    pairs, alone = find_pairs(tmp_path)
    assert (len(pairs), alone) == (1, 0)
    assert pairs[0].pressed
    small, large = pairs[0].values(SPEED) or (0.0, 0.0)
    assert small > large > 0, "an 8B model makes fewer tokens than a 0.6B one"
    assert rank_all(pairs, SPEED) == {"small": Ranking()}
    text = main(tmp_path)
    assert "1 cells, 1 of them pressed" in text
    assert text.count(f"{100 * (1 - large / small):.1f} %") == 3
    assert f"| small {100 * (1 - large / small):.1f} % |" in text
    assert "too few (< 10)" in text
    assert main(tmp_path, ["default"]) == text
    with pytest.raises(ConfigError, match=r"POLICY must be of default, got .*sjf"):
        main(tmp_path, ["sjf"])


def test_folder_without_both_sides_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="runs below both device/ and simulated/"):
        find_pairs(tmp_path)


def test_every_setting_names_what_exists():
    """With run.py's own checks of names, before anything runs."""

    for cell in cells(list(WORKLOADS), list(POLICIES), [0]):
        line: Any = prepare([*cell.overrides, "mode=simulate"])
        assert line
