"""experiments/compare: pairs, intervals, refusals, and what is written."""

import csv

import pytest

from core.errors import ConfigError
from experiments.compare.__main__ import main
from experiments.compare.differences import compare
from experiments.compare.pareto import points
from experiments.paper.folders import find_runs
from experiments.paper.groups import arrange
from experiments.paper.metrics import metric
from tests.experiments.paper.run_folders import request, step, write_run
from tests.plugins.sink.wandb_file import of_kind, records

ROWS = [request("a", 0.0, 1.0), request("b", 1.0, 3.0)]


def throughput(value):
    return {"throughput": {"output_tokens_per_s": value}}


def compared(tmp_path, *names, baseline="base", **more):
    groups = arrange(find_runs([tmp_path])[0])
    return compare(groups, [metric(name) for name in names], baseline, **more)


def test_difference_is_paired_by_seed(tmp_path):
    for seed, base, own in ((0, 100.0, 110.0), (1, 200.0, 212.0), (2, 300.0, 314.0)):
        write_run(tmp_path, "base", seed, ROWS, throughput(base))
        write_run(tmp_path, "own", seed, ROWS, throughput(own))
    (found,) = compared(tmp_path, "output_tokens_per_s").differences
    assert (found.baseline, found.own) == (200.0, 212.0)
    assert found.difference.mean == pytest.approx(12.0)
    half = 4.3027 * 2 / 3**0.5  # t(2) times the standard error of 10, 12, 14
    assert found.difference.low == pytest.approx(12 - half, abs=1e-3)
    assert found.difference.method == "t over 3 seeds"
    assert found.verdict == "better"
    assert found.relative == pytest.approx(0.06)


def test_verdict_follows_the_metric_and_needs_a_clear_interval(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "base", seed, ROWS, {"preemptions": 1, **throughput(10 + seed)})
        write_run(tmp_path, "own", seed, ROWS, {"preemptions": 4, **throughput(10 + 2 * seed)})
    found = compared(tmp_path, "preemptions", "output_tokens_per_s").differences
    assert [one.verdict for one in found] == ["worse", ""]


def test_one_seed_is_bootstrapped_over_requests_and_labelled(tmp_path):
    base = [request(f"r{i}", i, 1.0 + i % 5) for i in range(50)]
    own = [request(f"r{i}", i, 2.0 + i % 5) for i in range(50)]
    latency = {"latency": {"ttft_s": {"mean": 3.0}}}
    write_run(tmp_path, "base", 0, base, {**latency, **throughput(5.0)})
    write_run(tmp_path, "own", 0, own, {"latency": {"ttft_s": {"mean": 4.0}}, **throughput(6.0)})
    first, second = compared(tmp_path, "ttft_mean", "output_tokens_per_s").differences
    assert first.difference.low == pytest.approx(1.0)  # every request waits a second longer
    assert first.difference.high == pytest.approx(1.0)
    assert first.difference.method == "bootstrap over 50 requests of one seed"
    assert (second.difference.low, second.difference.method) == (None, "")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([ROWS[0]], "request_id differs: 1 are in one alone, such as b"),
        ([ROWS[0], request("b", 1.0, client="x")], "client of b differs:  and x"),
        ([ROWS[0], request("b", 1.0, prompt_tokens=9)], "prompt_tokens of b differs: 10.0 and 9.0"),
        ([ROWS[0], request("b", 1.5)], "arrival_s of b differs: 1.0 and 1.5 .--closed-loop"),
    ],
    ids=["id", "client", "prompt", "arrival"],
)
def test_runs_of_different_requests_are_not_paired(tmp_path, other, message):
    write_run(tmp_path, "base", 0, ROWS, throughput(1.0))
    write_run(tmp_path, "own", 0, other, throughput(1.0))
    with pytest.raises(ConfigError, match=message):
        compared(tmp_path, "output_tokens_per_s")


def test_arrivals_may_differ_in_a_closed_loop(tmp_path):
    write_run(tmp_path, "base", 0, ROWS, throughput(1.0))
    write_run(tmp_path, "own", 0, [ROWS[0], request("b", 1.5)], throughput(2.0))
    assert compared(tmp_path, "output_tokens_per_s", closed_loop=True).differences


def test_notes_tell_of_lengths_machines_and_missing_partners(tmp_path):
    longer = [ROWS[0], request("b", 1.0, 3.0, output_tokens=7)]
    write_run(tmp_path, "base", 0, ROWS, throughput(1.0))
    write_run(tmp_path, "own", 0, longer, throughput(2.0), manifest={"device": "cuda:0"})
    write_run(tmp_path, "own", 1, ROWS, throughput(2.0))
    notes = "\n".join(compared(tmp_path, "output_tokens_per_s").notes)
    assert "own, seed 0: 1 of 2 requests ended with another number of tokens" in notes
    assert "device differs within pairs: cpu and cuda:0" in notes
    assert "1 seeds of own or base have no partner" in notes


def test_baseline_must_be_there(tmp_path):
    write_run(tmp_path, "own", 0, ROWS, throughput(1.0))
    with pytest.raises(ConfigError, match=r"--baseline must be a label .* of own, got 'fcfs'"):
        compared(tmp_path, "output_tokens_per_s", baseline="fcfs")


def test_pareto_front_holds_who_is_beaten_by_nobody(tmp_path):
    for policy, rate, wait in (("a", 10, 1), ("b", 20, 2), ("c", 15, 3), ("d", 10, 1)):
        summary = {**throughput(float(rate)), "latency": {"e2e_s": {"p99": float(wait)}}}
        write_run(tmp_path, policy, 0, ROWS, summary)
    groups = arrange(find_runs([tmp_path])[0])
    found = points(groups, metric("output_tokens_per_s"), metric("e2e_p99"))
    assert {one.policy for one in found if one.on_front} == {"a", "b", "d"}


def test_command_writes_table_plot_and_first_step(tmp_path, capsys):
    steps = [step(1, [("admitted", "a", "prompt_fits", "room")])]
    for policy in ("base", "own"):
        victim = [("preempted", "b", policy, f"{policy} says so")] if policy == "own" else []
        write_run(
            tmp_path / "sweep",
            policy,
            0,
            ROWS,
            {**throughput(2.0), "latency": {"e2e_s": {"p99": 2.0}}},
            steps=[*steps, step(2, victim)],
        )
    out = tmp_path / "out"
    assert main([str(tmp_path / "sweep"), "--baseline", "base", "--out", str(out)]) == 0
    written = {path.name for path in out.iterdir()}
    assert {"differences.csv", "compare.md", "pareto.csv", "pareto.pdf", "pareto.png"} <= written
    with open(out / "differences.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["own", "own"]
    assert {row["metric"] for row in rows} == {"output_tokens_per_s", "e2e_p99"}
    text = capsys.readouterr().out
    assert "Decisions differ from step 2 on." in text
    assert "preempted b by own: own says so" in text
    assert (out / "compare.md").read_text() in text


def test_comparison_is_a_run_in_the_sweeps_group(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))
    latency = {"latency": {"e2e_s": {"p99": 2.0}}}
    for policy in ("base", "own"):
        summary = {**throughput(2.0), **latency, "sweep": {"folder": "swept", "position": 0}}
        write_run(tmp_path / "runs", policy, 0, ROWS, summary)
    out = tmp_path / "out"
    arguments = [str(tmp_path / "runs"), "--baseline", "base", "--out", str(out)]
    assert main([*arguments, "--wandb", "papers"]) == 0
    (folder,) = (out / "wandb").glob("offline-run-*")
    found = records(folder)
    (run,) = of_kind(found, "run")
    assert (run.project, run.run_group, run.job_type) == ("papers", "swept", "compare")
    files = {one.path for record in of_kind(found, "files") for one in record.files}
    assert any(path.startswith("media/table/differences") for path in files)
    assert any(path.startswith("media/images/pareto") for path in files)


def test_command_says_what_is_wrong(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "FOLDER must be a folder of runs" in capsys.readouterr().err
    write_run(tmp_path, "own", 0, ROWS, throughput(1.0))
    assert main([str(tmp_path), "--metric", "speed"]) == 1
    assert "metric must be one of output_tokens_per_s" in capsys.readouterr().err
