"""Waste and concurrency by what is reserved, from known summaries and from small runs."""

import pytest

from core.errors import ConfigError
from experiments.paged_vs_contiguous.table import main
from experiments.paper.folders import find_runs
from tests.experiments.paper.run_folders import write_run

TINY = (
    *("+experiment=paged_vs_contiguous", "executor=fake", "seed=0", "workload.num_requests=24"),
    *("workload.rate=null", "workload.prompt={kind: fixed, value: 12}", "workload.max_tokens=40"),
    *("workload.output={kind: uniform, low: 5, high: 5}", "engine.max_model_len=40"),
    *("engine.pool_tokens=160", "measure.warm_up=0", "measure.drain=0", "allocator.page_size=4"),
    *("~sinks.figures", "~sinks.timeline", "~sinks.console"),
)


def run(folder, allocator, internal, batch, page_size=16, forced=True):
    summary = {
        "hooks": {"build_allocator": allocator},
        "kv": {"page_size": page_size, "live_mean": 0.5},
        "waste": {"internal": internal, "external": 0.0, "total": internal},
        "batch": {"batch_mean": batch},
        "recompute_tax": 0.05,
        "throughput": {"output_tokens_per_s": 100.0 * batch},
        "tokens": {"prompt": 300, "output": 100},
        "requests": {"completed": 10},
    }
    config = {"workload": {"prompt": {"value": 30}, "forced": forced}}
    write_run(folder, summary=summary, config={**config, "engine": {"max_model_len": 100}})


def test_gain_of_pages_stands_beside_what_the_use_of_contiguous_runs_predicts(tmp_path):
    run(tmp_path, "contiguous", 0.75, 4.0)
    run(tmp_path, "contiguous", 0.2, 8.0, forced=False)
    run(tmp_path, "paged", 0.02, 14.0)
    title, _, _, _, first, second, third = main([tmp_path]).splitlines()
    assert title == "Mean final length 40.0% of the maximum"
    assert first.startswith("| contiguous, the maximum | 1 | 75.0 | 0.0 | 75.0 | 50.0 | 4.0 |")
    assert first.endswith("| 5.0 | 400 | 1.00 |  |")
    assert second.startswith("| contiguous, its own length |")
    assert second.endswith("| 800 | 2.00 |  |")
    assert third.startswith("| pages of 16 |")
    assert third.endswith("| 1,400 | 3.50 | 4.00 |")


def test_load_without_the_baseline_is_refused(tmp_path):
    run(tmp_path, "paged", 0.02, 14.0)
    with pytest.raises(ConfigError, match="contiguous, the maximum"):
        main([tmp_path])


def test_a_pool_of_four_maxima_runs_four_contiguous_requests_and_more_paged(command, tmp_path):
    """Runs of 40 slots against pages of 4 for the 12 of a prompt, then 16 of the whole: of a pool
    of 160 slots four runs, or ten requests at their longest."""
    assert command("-m", *TINY, "allocator=contiguous,paged").code == 0
    runs, _ = find_runs([tmp_path / "outputs"])
    contiguous, paged = (run.summary for run in runs)
    assert contiguous["batch"]["running_peak"] == 4
    assert paged["batch"]["running_peak"] >= 10
    # A request that runs holds 12 to 16 of its 40 slots, at most 3 of a page's 4 are empty.
    assert 1 - 16 / 40 <= contiguous["waste"]["internal"] <= 1 - 12 / 40 + 0.1
    assert paged["waste"]["internal"] < 3 / 16
    rows = main([tmp_path / "outputs"]).splitlines()[4:]
    assert [row.split(" | ")[0] for row in rows] == ["| contiguous, the maximum", "| pages of 4"]
