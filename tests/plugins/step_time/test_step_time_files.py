"""Files of conf/executor/step_time list their class's arguments, and a simulation can use them."""

import inspect
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from conf.instantiate import build
from plugins.executor.simulated import Simulated

FOLDER = Path(__file__).resolve().parents[3] / "conf" / "executor" / "step_time"
FILES = sorted(FOLDER.glob("*.yaml"))
NEEDS_A_FILE = "calibrated"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_lists_every_argument(file: Path):
    node = yaml.safe_load(file.read_text())
    parameters = inspect.signature(resolve_name(node["_target_"])).parameters
    assert set(node) - {"_target_"} == set(parameters)


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem != NEEDS_A_FILE], ids=lambda file: file.stem
)
def test_file_builds_a_model_that_takes_longer_for_more(file: Path):
    model = Simulated(build("executor.step_time", yaml.safe_load(file.read_text()))).step_time
    assert 0 < model.seconds(1, 1, 1, 1) < model.seconds(64, 8192, 100_000, 10_000_000)
