"""plugins/step_time/calibrated.py: a file's figures by hand, and what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.executor.simulated import Simulated
from plugins.mode.calibrate_fit import Fit, steps_of
from plugins.mode.calibrate_grid import Point
from plugins.mode.calibrate_refit import grid_of
from plugins.shared.calibration import TERMS, Calibration, Form, load, residuals
from plugins.shared.launch_sizes import KINDS, LaunchSizes
from plugins.step_time import calibrated
from plugins.step_time.calibrated import Calibrated

NONE = residuals(np.empty(0), np.empty(0))
ZERO = dict.fromkeys(TERMS, 0.0)
DECODE = Form([1, 2, 4], [1.0, 3.0, 5.0], ZERO | {"near": 10.0, "kv_token": 100.0})
GRAPHED = Form([8, 16], [20.0, 60.0], ZERO | {"row": 1.0, "depth": 1e3})
OTHER = Form([8, 32], [7.0, 31.0], ZERO | {"pair": 1e4})
FORMS = {"decode": DECODE, "graphed": GRAPHED, "other": OTHER}
GIVEN = Calibration(
    model="toy",
    device="bench",
    dtype="float32",
    num_devices=1,
    forms=FORMS,
    sizes=LaunchSizes([1, 2, 4], [8, 16, 32], [8, 32], [16], mixed_pairs=99),
    host_s=0.5,
    host_row_s=0.25,
    host_new_s=0.125,
    launch_s={"mixed": [2.0, 3.0]},
    pool_tokens=4096,
    memory_share=0.9,
    fit=NONE,
    test=residuals(np.array([1.1, 2.0]), np.array([1.0, 2.0])),
    traffic=NONE,
    measured={"commit": "abc"},
    repeats=3,
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


def test_seconds_are_the_sum_of_the_terms_of_the_form(file: str):
    model = Calibrated(file)
    # 3 rows lie between 2 and 4; each reads 10 tokens. 2 rows of 500: near is 256, no more.
    assert model.seconds_of("decode", 3, 3, 30, 30) == 4 + 100 + 3000
    assert model.seconds_of("decode", 2, 2, 1000, 1000) == 3 + 2560 + 100_000
    # 2 rows, 12 tokens: 50 pairs beyond the tokens read, 5 for each of 10 tokens
    assert model.seconds_of("graphed", 2, 12, 20, 70) == 40 + 2 + 5000
    for kind in ("chunk", "mixed", "eager"):
        assert model.seconds_of(kind, 1, 16, 20, 23) == 15 + 3e4


def test_base_goes_on_beyond_what_was_measured_and_stands_before(file: str):
    model = Calibrated(file)
    assert model.seconds_of("chunk", 1, 2, 9, 9) == 7
    assert model.seconds_of("chunk", 1, 42, 9, 9) == 41


def test_steps_of_no_known_kind_are_those_that_they_are_by_their_size(file: str):
    """Graphs of any rows take up to 16 tokens."""
    model = Calibrated(file)
    for kind, facts in {
        "decode": (3, 3, 30, 30),
        "graphed": (2, 12, 20, 70),
        "chunk": (2, 17, 20, 70),
    }.items():
        assert model.seconds(*facts) == model.seconds_of(kind, *facts)


def test_kind_that_was_not_measured_is_taken_for_another(tmp_path: Path):
    replace(GIVEN, forms={"other": OTHER}).save(tmp_path / "one.json")
    model = Calibrated(str(tmp_path / "one.json"))
    assert model.seconds_of("decode", 8, 8, 20, 23) == 7 + 3e4


def test_arrays_give_what_numbers_give(file: str):
    model = Calibrated(file)
    rows, tokens = np.array([1, 2, 3, 1]), np.array([1, 8, 3, 30])
    together = model.seconds(rows, tokens, 10 * tokens, 20 * tokens)
    one_by_one = [model.seconds(r, t, 10 * t, 20 * t) for r, t in zip(rows, tokens, strict=True)]
    assert together.tolist() == one_by_one


def test_file_comes_back_as_it_was_saved(file: str):
    assert load(Path(file)) == GIVEN


def test_executor_takes_host_times_and_sizes_from_the_file_unless_it_has_its_own(file: str):
    model = Calibrated(file)
    measured = Simulated(model).times
    hosts_s = measured.host_s, measured.host_row_s, measured.host_new_s
    assert (hosts_s, measured.sizes) == ((0.5, 0.25, 0.125), GIVEN.sizes)
    starts_s = dict.fromkeys(KINDS, (0.0,)) | dict.fromkeys(("mixed", "chunk"), (2.0, 3.0))
    assert measured.launch_s == starts_s
    zero = {"host_s": 0.0, "host_row_s": 0.0, "host_new_s": 0.0}
    own = Simulated(model, **zero, graph_sizes=[], launch_s={}).times
    assert {name: getattr(own, name) for name in zero} == zero
    assert list(own.sizes.graphs) == []
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
        {"forms": {"other": asdict(OTHER) | {"base_s": [1.0]}}},
        {"forms": {"other": asdict(OTHER) | {"base_s": [1.0, -1.0]}}},
        {"forms": {"other": asdict(OTHER) | {"tokens": [2, 1]}}},
        {"forms": {"other": asdict(OTHER) | {"terms": {"row": 1.0}}}},
        {"forms": {"decode": asdict(DECODE)}},
        {"coefficients": {"step": 1.0}, "version": 2},
    ],
)
def test_file_of_another_form_is_refused(tmp_path: Path, broken: dict[str, Any]):
    path = tmp_path / "broken.json"
    replace(GIVEN).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    with pytest.raises(
        ConfigError, match=r"step_time.file must be a calibration file of version 4"
    ):
        load(path)


def test_context_read_again_has_a_price_of_its_own(tmp_path: Path):
    """Of 300 tokens 200 are a prefix that another row holds."""
    cheap = replace(DECODE, terms=DECODE.terms | {"repeat": 1.0})
    same = replace(DECODE, terms=DECODE.terms | {"repeat": 100.0})
    for form, seconds in ((cheap, 100 * 100 + 200), (same, 300 * 100)):
        replace(GIVEN, forms=FORMS | {"decode": form}).save(tmp_path / "again.json")
        model = Calibrated(str(tmp_path / "again.json"))
        base_s = 3 + 10 * 150
        assert model.seconds_of("decode", 2, 2, 300, 300, 200) == base_s + seconds
        assert model.seconds_of("decode", 2, 2, 300, 300) == base_s + 300 * 100


def test_only_a_file_that_tells_them_apart_asks_for_what_is_read_again():
    same = {"other": replace(OTHER, terms=ZERO | {"kv_token": 2.0, "repeat": 2.0})}
    assert not replace(GIVEN, forms=same).counts_repeats
    assert replace(GIVEN, forms=same | {"decode": DECODE}).counts_repeats


SHIPPED = sorted(calibrated.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_files_predict_the_points_in_them_as_they_say(path: Path):
    """By their coefficients, or where the host holds launches of a kind up, by one time for all."""
    found = load(path)
    points, timed, held_out = grid_of(json.loads(path.read_text()))
    steps = steps_of(map(Point.facts, points, timed), found.sizes, found.repeats)
    told = np.array([one["predicted_s"] for one in found.points])
    device_s = Fit(found.forms, {}).seconds(steps)
    waits = told > device_s * (1 + 1e-9)
    assert told[~waits] == pytest.approx(device_s[~waits])
    assert (~waits).sum() > 100
    for kind in set(steps.kind[waits].tolist()):
        own = told[waits & (steps.kind == kind)]
        assert own == pytest.approx(np.full(len(own), own[0]))
    assert residuals(told[held_out], steps.seconds[held_out]) == found.test
    assert len(points) == found.fit.points + found.test.points
    assert found.test.mape < 0.05
    assert found.traffic.mape < 0.022


@pytest.mark.parametrize(("known", "other"), [("mixed", "chunk"), ("chunk", "mixed")])
def test_a_kind_that_the_run_did_not_hold_takes_the_host_what_its_like_did(
    tmp_path: Path, known: str, other: str
):
    path = tmp_path / "toy.json"
    replace(GIVEN, launch_s={known: [2.0, 3.0], "graphed": [1.0]}).save(path)
    assert Calibrated(str(path)).launch_s == {
        known: [2.0, 3.0], other: [2.0, 3.0], "graphed": [1.0]
    }  # fmt: skip
    both = {"mixed": [2.0], "chunk": [4.0]}
    replace(GIVEN, launch_s=both).save(path)
    assert Calibrated(str(path)).launch_s == both
    replace(GIVEN, launch_s={}).save(path)
    assert Calibrated(str(path)).launch_s == {}
