"""The table of continuous over request-level batching, from runs with known outputs."""

import pytest

from core.errors import ConfigError
from experiments.continuous_vs_static.table import main
from tests.experiments.paper.run_folders import request, write_run


def run(folder, batching, seed, tokens_per_s, outputs, step_time="roofline.Roofline"):
    requests = [request(f"r{i}", output_tokens=n) for i, n in enumerate(outputs)]
    summary = {
        "hooks": {"decide_batch": batching, "build_executor": "simulated"},
        "batch": {"batch_mean": 1.25},
        "steps": {"mean_s": 0.004},
        "throughput": {"output_tokens_per_s": tokens_per_s},
    }
    config = {"executor": {"step_time": {"_target_": f"plugins.step_time.{step_time}"}}}
    write_run(folder, seed=seed, requests=requests, summary=summary, config=config)


def test_ratio_stands_beside_its_bound_seed_by_seed(tmp_path):
    run(tmp_path, "static", 0, 100.0, [10, 10, 10, 10, 60])  # 60 / 20
    run(tmp_path, "chunked", 0, 240.0, [60, 10, 10, 10, 10])
    run(tmp_path, "static", 1, 100.0, [30, 10])  # 30 / 20
    run(tmp_path, "chunked", 1, 150.0, [10, 30])
    lines = main([tmp_path]).splitlines()
    assert lines[0] == "toy, roofline"
    assert lines[2].startswith("| seed | static, tokens/s | chunked, tokens/s | ratio |")
    assert lines[4] == "| 0 | 100 | 240 | 2.40 | 3.00 | 0.80 | 1.2, 4.00 | 1.2, 4.00 |"
    assert lines[5] == "| 1 | 100 | 150 | 1.50 | 1.50 | 1.00 | 1.2, 4.00 | 1.2, 4.00 |"
    assert lines[6].startswith("| mean |  |  | 1.95 ± ")


def test_each_model_of_a_step_has_a_table_of_its_own(tmp_path):
    for step_time in ("roofline.Roofline", "fixed.Fixed"):
        run(tmp_path, "static", 0, 100.0, [10, 30], step_time)
        run(tmp_path, "chunked", 0, 150.0, [10, 30], step_time)
    titles = [line for line in main([tmp_path]).splitlines() if line.startswith("toy")]
    assert sorted(titles) == ["toy, fixed", "toy, roofline"]


def test_other_requests_for_a_seed_are_refused(tmp_path):
    run(tmp_path, "static", 0, 100.0, [10, 60])
    run(tmp_path, "chunked", 0, 240.0, [10, 61])
    with pytest.raises(ConfigError, match="the same outputs for a seed"):
        main([tmp_path])


def test_sweep_without_the_baseline_is_refused(tmp_path):
    run(tmp_path, "chunked", 0, 240.0, [10, 61])
    with pytest.raises(ConfigError, match="batching=static"):
        main([tmp_path])


def test_refilled_places_gain_most_of_the_bound_where_steps_take_the_same_time(command, tmp_path):
    """Four places and 200 requests, simulated: static runs its batches one after another."""
    few = ("seed=0", "workload.num_requests=200", "engine.max_num_seqs=4")
    lengths = "workload.output={kind: mixture, values: [2, 40], weights: [0.8, 0.2]}"
    steps = ("executor/step_time=fixed", "executor.step_time.token_s=0")
    quiet = ("~sinks.figures", "~sinks.timeline", "~sinks.console")
    assert (
        command("-m", "+experiment=continuous_vs_static", *few, lengths, *steps, *quiet).code == 0
    )
    title, _, _, _, row, _ = main([tmp_path / "outputs"]).splitlines()
    assert title == "synthetic, fixed"
    ratio, bound = (float(cell) for cell in row.split("|")[4:6])
    assert 1.5 < ratio < bound
