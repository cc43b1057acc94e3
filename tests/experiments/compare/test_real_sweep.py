"""compare and figure on folders that run.py wrote: names and forms of the files agree."""

import csv

from experiments.compare.__main__ import main as compare
from experiments.figure.__main__ import main as figure

SWEEP = (
    "-m",
    "executor=fake",
    "workload=synthetic",
    "workload.num_requests=24",
    "workload.rate=40",
    "workload.num_clients=2",
    "engine.pool_tokens=1024",
    "defaults_behind.prompt_fits.growth_share=0",
    "measure.warm_up=0.1",
    "slo.ttft_s=0.5",
    "seed=0,1",
    "+policy=last_admitted,evict_longest",
    "hydra.sweep.dir=s",
    "progress=false",
    "~sinks.console",
    "~sinks.figures",
    "~sinks.timeline",
)


def test_a_sweep_is_compared_and_drawn(command, tmp_path, capfd):
    assert command(*SWEEP).code == 0
    assert compare(["s", "--baseline", "last_admitted", "--out", "out"]) == 0
    report = capfd.readouterr().out
    assert "Interval: t over 2 seeds." in report
    with open(tmp_path / "out" / "differences.csv", newline="") as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    assert {"output_tokens_per_s", "attainment", "ttft_p99", "itl_p99", "preemptions"} <= set(rows)
    assert float(rows["preemptions"]["baseline_mean"]) > 0
    # the same requests in the same order, until memory first runs short
    assert "Decisions differ from step" in report
    for policy in ("last_admitted", "evict_longest"):
        assert f" by {policy}: " in report
    for kind in ("over_time", "steps", "fairness"):
        assert figure([kind, "s", "--out", "out"]) == 0, kind
        assert (tmp_path / "out" / f"{kind}.csv").stat().st_size > 100

    alone = [str(path) for path in sorted(tmp_path.glob("s/*-s0-*"))]
    assert compare([*alone, "--baseline", "last_admitted", "--out", "one"]) == 0
    with open(tmp_path / "one" / "differences.csv", newline="") as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    for name in ("ttft_p99", "itl_p99", "recompute_tax"):
        row = rows[name]
        assert row["interval"] == "bootstrap over 22 requests of one seed"  # two are warm-up
        assert float(row["low"]) <= float(row["difference"]) <= float(row["high"])
    assert rows["output_tokens_per_s"]["interval"] == ""
