"""The table of what a prefix cache saved, from run folders of the command."""

from pathlib import Path

from experiments.paper.folders import find_runs
from experiments.prefix_cache import table

FAST = ("executor=fake", "records=requests", "~sinks.figures", "~sinks.timeline", "progress=false")


def test_rows_show_hits_beside_the_bounds(command, tmp_path, capfd):
    """Two groups of four prompts: two pages in common, one of their own. Ten seconds apart, so
    that all but each group's first find both: 12 of 24 pages."""
    load = ("workload=shared_prefix", "workload.num_groups=2", "workload.requests_per_group=4")
    sizes = ("workload.prefix_tokens=32", "workload.suffix_tokens=16", "workload.rate=0.1")
    assert command(*FAST, *load, *sizes, "-m", "cache=none,radix").code == 0
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    capfd.readouterr()
    assert table.main([str(sweep)]) == 0
    header, _, none, radix = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capfd.readouterr().out.splitlines()
    )
    none, radix = dict(zip(header, none, strict=True)), dict(zip(header, radix, strict=True))
    assert (none["cache"], none["hit rate"], none["prefilled"]) == ("none", "0.0%", "384")
    assert (radix["cache"], radix["hit rate"], radix["prefilled"]) == ("radix", "50.0%", "192")
    assert {row["infinite"] for row in (none, radix)} == {"50.0%"}
    assert {row["MIN"] for row in (none, radix)} == {"50.0%"}


def test_requests_of_a_closed_loop_are_made_again(command, tmp_path):
    load = ("workload=agent_sessions", "workload.num_sessions=1", "workload.max_turns=3")
    limits = ("workload.max_prompt=100000", "executor.max_model_len=131072", "executor.check=false")
    assert command(*FAST, *load, *limits, "engine.pool_tokens=262144").code == 0
    ((run,), _) = find_runs([Path(tmp_path / "outputs")])
    requests = table.requests_of(run)
    assert len(requests) == 3
    columns = run.requests
    expected = dict(zip(columns["request_id"], columns["prompt_tokens"], strict=True))
    assert {r.request_id: len(r.prompt) for r in requests} == expected
    assert [r.request_id for r in requests] == list(columns["request_id"])  # one after another


def test_run_without_a_completed_request_is_named_with_its_error(command, tmp_path, capfd):
    load = ("workload=shared_prefix", "workload.num_groups=1", "workload.requests_per_group=2")
    small = ("workload.prefix_tokens=64", "workload.suffix_tokens=16", "engine.pool_tokens=48")
    command(*FAST, *load, *small)  # no prompt of 80 tokens fits
    capfd.readouterr()
    assert table.main([str(tmp_path / "outputs")]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "completed requests of a run must be >= 1, got 0 in " in err
    assert "the pool holds 3 pages (48 tokens)" in err


def test_folder_without_runs_is_named(tmp_path, capfd):
    assert table.main([str(tmp_path / "nothing")]) == 1
    assert "FOLDER" in capfd.readouterr().err
