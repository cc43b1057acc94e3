"""`python run.py +experiment=goodput`: probes, results, what is done is not done again."""

import csv
import json
from pathlib import Path

import pytest

CAPACITY = '''
import json


class Server:
    """A mode whose share of requests within the SLO falls from 1 at `capacity` to 0 at twice it.
    A large one breaks above 4 requests a second."""

    def __init__(self, capacity: float, rate: float) -> None:
        self.capacity, self.rate = capacity, rate

    def run(self, session):
        if self.capacity > 100 and self.rate > 4:
            raise ZeroDivisionError("told to fail")
        over = self.rate / (self.capacity + session.run.seed) - 1
        share = max(0.0, 1.0 - max(over, 0.0))
        summary = {"policy": session.run.policy, "slo": {"attainment": share}}
        (session.folder / "summary.json").write_text(json.dumps(summary))
        return summary
'''
MODE = """# @package _global_
mode:
  _target_: capacity.Server
  capacity: 5.0
  rate: ${workload.rate}
"""


@pytest.fixture
def goodput(command, plugin_folder):
    (plugin_folder / "capacity.py").write_text(CAPACITY)
    (plugin_folder / "conf" / "mode" / "capacity.yaml").write_text(MODE)
    path = f'plugin_path="{plugin_folder}"'

    def call(*arguments):
        own = ["+experiment=goodput", "mode=capacity", "hydra.sweep.dir=s", "seed=0,2"]
        limits = ["hydra.sweeper.high=8", "hydra.sweeper.tolerance=0.5"]
        return command(path, *own, *limits, *arguments)

    return call


def result(tmp_path: Path) -> list[dict]:
    return json.loads((tmp_path / "s" / "goodput.json").read_text())["found"]


def test_probes_are_printed_the_rate_is_found_and_nothing_runs_twice(goodput, tmp_path):
    outcome = goodput("+policy=fcfs,mine")
    assert outcome.code == 0, outcome.err
    # shares at rate r are 2 - r / 5 for seed 0, 2 - r / 7 for seed 2, at most 1: 0.9 at r = 6
    for line in (
        "probe 1: +policy=fcfs workload.rate=4: 100.0 % (100.0 to 100.0) within SLO over 2 seeds,",
        "probe 2: +policy=mine workload.rate=8: 62.9 % (40.0 to 85.7) within SLO over 2 seeds,",
        "probe 3: +policy=mine workload.rate=5.66: 93.4 % (86.8 to 100.0) within SLO over 2 seeds,",
        "goodput of +policy=fcfs: workload.rate=5.66 (8 misses)",
    ):
        assert line in outcome.err
    found = result(tmp_path)
    assert [one["label"] for one in found] == ["+policy=fcfs", "+policy=mine"]
    assert all((one["goodput"], one["lowest_failing"]) == (5.66, 8.0) for one in found)
    assert all(one["settled"] and not one["failed"] for one in found)
    with open(tmp_path / "s" / "attainment.csv", newline="") as file:
        rows = {tuple(row.values())[:3]: float(row["attainment"]) for row in csv.DictReader(file)}
    assert len(rows) == 3 * 2 * 2
    assert rows["+policy=mine", "8.0", "0"] == pytest.approx(0.4)
    jobs = [line for line in outcome.err.splitlines() if line.startswith("job ")]
    order = [("mine" in line, "seed=2" in line) for line in jobs[:4]]  # policies take turns
    assert order == [(False, False), (True, False), (False, True), (True, True)]

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("s/*/summary.json")}
    again = goodput("+policy=fcfs,mine")
    assert again.err.count("done before, skipped") == len(before) == 12
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert result(tmp_path) == found


def test_a_failed_probe_ends_its_search_alone(goodput, tmp_path):
    outcome = goodput("mode.capacity=5.0,1000.0", "+policy=mine")
    assert outcome.code == 1
    assert "ZeroDivisionError: told to fail" in outcome.err
    small, large = result(tmp_path)
    assert (small["failed"], large["failed"]) == (False, True)
    assert small["goodput"] == 5.66
    assert "goodput of mode.capacity=1000.0: not found, a job failed" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("slo.ttft_s=null", "slo.tpot_s=null"),
            "slo.ttft_s, slo.tpot_s or slo.itl_s must be given",
        ),
        (("hydra.sweeper.rate=workload.load",), "hydra.sweeper.rate must be a rate of the load"),
        (("workload.rate=4",), "workload.rate must be left to the search"),
        (("hydra.sweeper.low=99",), "hydra.sweeper.high must be above hydra.sweeper.low"),
    ],
)
def test_what_cannot_be_searched_is_refused(goodput, tmp_path, arguments, message):
    outcome = goodput(*arguments)
    assert outcome.code == 1
    assert message in outcome.err
    assert not list(tmp_path.glob("s/*/summary.json"))
