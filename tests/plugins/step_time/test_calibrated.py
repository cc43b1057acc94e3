"""plugins/step_time/calibrated.py: a file's figures by hand, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.executor.simulated import Simulated
from plugins.mode.calibrate_fit import fit, steps_of
from plugins.mode.calibrate_grid import Point
from plugins.shared.calibration import Calibration, load, residuals
from plugins.shared.launch_sizes import KINDS, LaunchSizes
from plugins.step_time import calibrated
from plugins.step_time.calibrated import Calibrated

NONE = residuals(np.empty(0), np.empty(0))
COSTS = {
    "step": 1.0,
    "chunks": 10.0,
    "row": 100.0,
    "token": 1e3,
    "more_token": 1e4,
    "kv_token": 1e6,
    "pair": 1e8,
}
GIVEN = Calibration(
    model="toy",
    device="bench",
    dtype="float32",
    num_devices=1,
    coefficients=COSTS,
    knee_tokens=4,
    sizes=LaunchSizes([1, 2, 4], [8, 16, 32], [8, 32], [16]),
    host_s=0.5,
    host_row_s=0.25,
    launch_s={"mixed": [2.0, 3.0]},
    pool_tokens=4096,
    memory_share=0.9,
    fit=NONE,
    test=residuals(np.array([1.1, 2.0]), np.array([1.0, 2.0])),
    traffic=NONE,
    measured={"commit": "abc"},
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    GIVEN.save(tmp_path / "toy.json")
    return str(tmp_path / "toy.json")


def test_residuals_are_relative_to_what_was_measured():
    found = residuals(np.array([1.1, 1.8, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert (found.points, found.mape, found.max) == (
        3,
        pytest.approx(0.2 / 3),
        pytest.approx(0.1),
    )


def test_seconds_are_the_sum_of_the_terms(file: str):
    model = Calibrated(file)
    assert model.seconds(2, 2, 30, 30) == 1 + 200 + 2e3 + 30e6 + 30e8
    # 3 rows, 8 tokens: with a chunk, and 4 tokens beyond the knee
    assert model.seconds(3, 8, 20, 50) == 1 + 10 + 300 + 8e3 + 4e4 + 20e6 + 50e8


def test_arrays_give_what_numbers_give(file: str):
    model = Calibrated(file)
    rows, tokens = np.array([1, 2, 3]), np.array([1, 8, 3])
    together = model.seconds(rows, tokens, 10 * tokens, 20 * tokens)
    one_by_one = [model.seconds(r, t, 10 * t, 20 * t) for r, t in zip(rows, tokens, strict=True)]
    assert together.tolist() == one_by_one


def test_file_comes_back_as_it_was_saved(file: str):
    assert load(Path(file)) == GIVEN


def test_executor_takes_host_times_and_sizes_from_the_file_unless_it_has_its_own(file: str):
    model = Calibrated(file)
    measured = Simulated(model).times
    assert (measured.host_s, measured.host_row_s, measured.sizes) == (0.5, 0.25, GIVEN.sizes)
    starts_s = dict.fromkeys(KINDS, (0.0,)) | {"mixed": (2.0, 3.0)}
    assert measured.launch_s == starts_s
    own = Simulated(model, host_s=0.0, host_row_s=0.0, graph_sizes=[], launch_s={}).times
    assert (own.host_s, own.host_row_s, list(own.sizes.graphs)) == (0.0, 0.0, [])
    assert set(own.launch_s.values()) == {(0.0,)}


def test_description_carries_the_error_of_steps_held_out(file: str):
    described = Calibrated(file).describe()
    assert described["error"]["points"] == 2
    assert described["error"]["mape"] == pytest.approx(0.05)
    assert (described["device"], described["model"]) == ("bench", "toy")


def test_pool_is_that_of_the_measured_engine_and_for_no_other_share(file: str):
    model = Calibrated(file)
    assert model.pool_tokens(0.9) == 4096
    with pytest.raises(ConfigError, match=r"memory_share must be 0\.9, .* got 0\.5"):
        model.pool_tokens(0.5)


def test_missing_file_names_those_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
):
    monkeypatch.setattr(calibrated, "FOLDER", tmp_path)
    assert Calibrated("toy").calibration == GIVEN
    with pytest.raises(ConfigError, match=r"one of toy in .*, got 'h20'; .*mode=calibrate"):
        Calibrated("h20")
    with pytest.raises(ConfigError, match=r"a file that exists, got '/no/such.json'"):
        Calibrated("/no/such.json")


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 99},
        {"fit": {"points": 1}},
        {"coefficients": COSTS | {"row": -1.0}},
        {"coefficients": {"step": 1.0}},
    ],
)
def test_file_of_another_form_is_refused(tmp_path: Path, broken: dict[str, Any]):
    path = tmp_path / "broken.json"
    replace(GIVEN).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    with pytest.raises(
        ConfigError, match=r"step_time.file must be a calibration file of version 2"
    ):
        load(path)


SHIPPED = sorted(calibrated.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_coefficients_are_what_the_fit_makes_of_the_points_in_the_file(path: Path):
    found = load(path)
    points = [Point(p["rows"], p["context"], p["chunk"], p["past"]) for p in found.points]
    rows = [
        (one.rows, one.num_rows, one.num_tokens, one.kv_tokens, one.attended, point["seconds"])
        for one, point in zip(points, found.points, strict=True)
    ]
    held_out = np.array([point["held_out"] for point in found.points])
    steps = steps_of(rows, found.sizes)
    again = fit(steps.part(~held_out))
    assert again.knee_tokens == found.knee_tokens
    assert dict(again.coefficients) == pytest.approx(dict(found.coefficients), rel=1e-6)
    error = np.abs(again.seconds(steps) / steps.seconds - 1)[held_out].mean()
    assert error == pytest.approx(found.test.mape, rel=1e-6)
    assert found.test.mape < 0.07
