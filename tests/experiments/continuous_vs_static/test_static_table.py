"""The table of continuous over request-level batching, from runs with known outputs."""

import pytest

from core.errors import ConfigError
from experiments.continuous_vs_static.table import main
from tests.experiments.paper.run_folders import request, write_run


def run(folder, batching, seed, tokens_per_s, outputs):
    requests = [request(f"r{i}", output_tokens=n) for i, n in enumerate(outputs)]
    summary = {
        "hooks": {"decide_batch": batching},
        "throughput": {"output_tokens_per_s": tokens_per_s},
    }
    write_run(folder, seed=seed, requests=requests, summary=summary)


def test_ratio_stands_beside_its_bound_seed_by_seed(tmp_path):
    run(tmp_path, "static", 0, 100.0, [10, 10, 10, 10, 60])  # 60 / 20
    run(tmp_path, "chunked", 0, 240.0, [60, 10, 10, 10, 10])
    run(tmp_path, "static", 1, 100.0, [30, 10])  # 30 / 20
    run(tmp_path, "chunked", 1, 150.0, [10, 30])
    lines = main([tmp_path]).splitlines()
    assert lines[0].startswith("| seed | static, tokens/s | chunked, tokens/s | ratio |")
    assert lines[2] == "| 0 | 100 | 240 | 2.40 | 3.00 | 0.80 |"
    assert lines[3] == "| 1 | 100 | 150 | 1.50 | 1.50 | 1.00 |"
    assert lines[4].startswith("| mean |  |  | 1.95 ± ")


def test_other_requests_for_a_seed_are_refused(tmp_path):
    run(tmp_path, "static", 0, 100.0, [10, 60])
    run(tmp_path, "chunked", 0, 240.0, [10, 61])
    with pytest.raises(ConfigError, match="the same outputs for a seed"):
        main([tmp_path])


def test_sweep_without_the_baseline_is_refused(tmp_path):
    run(tmp_path, "chunked", 0, 240.0, [10, 61])
    with pytest.raises(ConfigError, match="batching=static"):
        main([tmp_path])
