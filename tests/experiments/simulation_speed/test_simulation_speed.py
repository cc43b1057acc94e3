"""experiments/simulation_speed: its workload is the trace's, and a run is measured."""

import numpy as np
import pytest
import yaml

from experiments.simulation_speed.measure import COLUMNS, Cost, drawn, measure, quantiles
from plugins.workload.azure import read_azure
from plugins.workload.synthetic import Synthetic


def test_lengths_drawn_have_the_means_of_the_trace():
    own = read_azure("conv")
    options = dict(option.split("=", 1) for option in drawn(20_000))
    assert options["workload"] == "synthetic"
    prompt, output = (yaml.safe_load(options[f"workload.{name}"]) for name in ("prompt", "output"))
    requests = Synthetic(20_000, prompt, output).requests(None, 100, 0)
    means = np.mean([(len(r.prompt), r.forced_output) for r in requests[:5000]], axis=0)
    assert means[0] == pytest.approx(own.prompt_tokens.mean(), rel=0.05)
    assert means[1] == pytest.approx(own.output_tokens.mean(), rel=0.05)


def test_quantiles_are_lengths_of_the_trace_in_order():
    found = quantiles(np.arange(1, 641))
    assert found == list(range(5, 641, 10))


def test_costs_are_per_request_in_time_of_the_processor():
    cost = Cost(1000, "summary", 3.0, 2.0, 50 * 2**20, 4000, 7200.0)
    row = dict(zip(COLUMNS, cost.row(), strict=True))
    assert row["seconds"] == "3.00"
    assert row["requests a CPU second"] == "500"
    assert row["CPU us a request"] == "2,000"
    assert row["peak MiB"] == "50"
    assert row["simulated hours"] == "2.00"


def test_run_is_measured_in_a_process_of_its_own():
    cost = measure(6, "summary", ["workload.num_requests=6"])
    assert cost.seconds > 0
    assert cost.cpu_s > 0
    assert cost.num_steps >= 16
    assert 10 * 2**20 < cost.peak_bytes < 2**31


def test_failed_run_is_an_error_that_tells_why():
    with pytest.raises(RuntimeError, match=r"workload.num_requests must be >= 1"):
        measure(0, "summary", ["workload.num_requests=0"])
