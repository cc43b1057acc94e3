"""experiments/paper/samples.py: a bootstrap's statistic equals the metric's definition."""

import numpy as np
import pytest

from experiments.paper.metrics import metric
from experiments.paper.samples import statistic
from tests.experiments.paper.run_folders import request, write_run

ORDER = np.array(["a", "b", "c", "d"])


@pytest.fixture
def run(tmp_path):
    rows = [  # in order of ending, which is not that of ORDER
        request("d", ttft_s=8.0, cached_tokens=5, preemptions=2, recomputed_tokens=4),
        request("b", ttft_s=2.0),
        request("c", ttft_s=4.0, finish_reason="abort"),
        request("a", ttft_s=1.0, cached_tokens=10),
    ]
    gaps = {"a": [0.1, 0.2], "b": [0.3], "c": [9.0], "d": [0.4, 0.5, 0.6]}
    return write_run(tmp_path, requests=rows, gaps_s=gaps)


def once():
    return np.ones(4, np.int64)


def value(name, run, counts):
    found = statistic(metric(name), run, ORDER)
    assert found is not None
    return found(np.asarray(counts))


def test_quantiles_count_completed_requests_alone(run):
    assert value("ttft_p50", run, once()) == 2.0  # of 1, 2, 8
    assert value("ttft_p99", run, once()) == pytest.approx(np.percentile([1, 2, 8], 99))
    assert value("ttft_mean", run, once()) == pytest.approx(11 / 3)


def test_a_request_drawn_twice_counts_twice(run):
    drawn = [3, 0, 1, 2]
    assert value("ttft_p90", run, drawn) == pytest.approx(np.percentile([1, 1, 1, 8, 8], 90))
    assert value("ttft_p50", run, [0, 0, 4, 0]) is None


def test_gaps_are_weighed_by_their_request_and_shown_in_milliseconds(run):
    gaps = [0.1, 0.2, 0.1, 0.2, 0.4, 0.5, 0.6]
    assert value("itl_p90", run, [2, 0, 5, 1]) == pytest.approx(1000 * np.percentile(gaps, 90))


def test_ratios_are_of_sums(run):
    assert value("hit_rate", run, once()) == pytest.approx(100 * 15 / 40)
    assert value("hit_rate", run, [2, 0, 0, 1]) == pytest.approx(100 * 25 / 30)
    assert value("recompute_tax", run, once()) == pytest.approx(100 * 4 / 44)
    assert value("preemptions", run, [0, 0, 0, 3]) == 6


def test_throughput_is_no_function_of_requests(run):
    assert statistic(metric("output_tokens_per_s"), run, ORDER) is None
