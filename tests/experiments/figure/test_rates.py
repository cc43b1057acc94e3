"""experiments/figure/rates.py: what is plotted over the arrival rate."""

import pytest

from core.errors import ConfigError
from experiments.figure.options import Options, Slo
from experiments.figure.rates import attained, attainment, crossing, goodput, highest, latency_rate
from experiments.paper.metrics import metric
from tests.experiments.paper.run_folders import request, write_run


def runs_over(tmp_path, values, summary):
    """A run for each (policy, seed, rate) -> value."""
    return [
        write_run(
            tmp_path, policy, seed, summary=summary(value), config={"workload": {"rate": rate}}
        )
        for (policy, seed, rate), value in values.items()
    ]


def test_a_line_a_policy_with_t_bounds_over_seeds(tmp_path):
    values = {("a", seed, rate): rate + seed for seed in (0, 1, 2) for rate in (8, 2)}
    values[("b", 0, 2)] = 5.0
    runs = runs_over(tmp_path, values, lambda v: {"latency": {"ttft_s": {"p50": v}}})
    plot = latency_rate(runs, Options(metrics=(metric("ttft_p50"),)))
    first, second = plot.lines
    assert (first.label, list(first.x), list(first.y)) == ("a", [2.0, 8.0], [3.0, 9.0])
    assert first.low[0] == pytest.approx(3 - 4.3027 / 3**0.5, abs=1e-3)
    assert (second.label, list(second.y), list(second.low)) == ("b", [5.0], [None])
    assert plot.rows()[0][:4] == ("ttft_p50", "a", 2.0, 3.0)


def test_attainment_counts_failures_and_every_limit(tmp_path):
    rows = [
        request("good", ttft_s=1.0, tpot_s=0.1),
        request("late", ttft_s=3.0, tpot_s=0.1),
        request("slow", ttft_s=1.0, tpot_s=0.5),
        request("failed", ttft_s=1.0, tpot_s=0.1, finish_reason="error"),
        request("one token", ttft_s=1.0, tpot_s=None),
        request("before", arrival_s=-1.0),
    ]
    gaps = {name: [0.1] for name in ("good", "late", "slow")} | {"one token": []}
    window = {"measured": {"from_s": 0.0, "to_s": None}}
    run = write_run(tmp_path, requests=rows, gaps_s=gaps, summary=window)
    assert attained(run, Slo(ttft_s=2.0)) == 3 / 5
    assert attained(run, Slo(ttft_s=2.0, tpot_s=0.2)) == 2 / 5
    assert attained(run, Slo(itl_s=0.05)) == 1 / 5
    assert attained(run, Slo(itl_s=0.15)) == 4 / 5


def test_attainment_without_limits_is_the_runs_own(tmp_path):
    run = write_run(tmp_path, summary={"slo": {"attainment": 0.75}})
    assert attained(run, Slo()) == 0.75
    with pytest.raises(ConfigError, match="--ttft, --tpot or --itl must be given"):
        attained(write_run(tmp_path), Slo())


def test_goodput_is_the_highest_rate_below_the_first_failure():
    assert highest([1, 2, 4, 8], [1.0, 0.95, 0.8, 0.92], 0.9) == 2
    assert highest([1, 2], [0.95, 0.9], 0.9) == 2
    assert highest([1], [0.5], 0.9) is None


def test_goodput_is_marked_on_the_curve_and_drawn_as_bars(tmp_path):
    shares = {1: (1.0, 1.0), 2: (0.95, 0.91), 4: (0.92, 0.7)}
    values = {("a", seed, rate): pair[seed] for rate, pair in shares.items() for seed in (0, 1)}
    runs = runs_over(tmp_path, values, lambda v: {"slo": {"attainment": v, "target": 0.9}})
    curve = attainment(runs, Options())
    assert curve.marks == [("attainment", "a", 2.0)]
    assert [round(y, 6) for y in curve.lines[0].y] == [100, 93, 81]
    (bar,) = goodput(runs, Options()).bars
    assert (bar.group, bar.label, bar.samples) == ("toy", "a", 2)
    assert bar.value == pytest.approx((4 + (2 + 2 * 0.01 / 0.21)) / 2)


def test_curve_of_a_seed_crosses_the_target_between_the_rates_tried():
    assert crossing([1, 2, 4], [1.0, 0.95, 0.85], 0.9) == pytest.approx(3.0)
    assert crossing([1, 2], [1.0, 0.9], 0.9) == 2
    assert crossing([1, 2], [0.8, 0.95], 0.9) == 0.0


def test_axis_must_be_a_number(tmp_path):
    run = write_run(tmp_path, config={"workload": {"rate": None}})
    with pytest.raises(ConfigError, match="--x must name a number"):
        latency_rate([run], Options())
    with pytest.raises(ConfigError, match=r"workload.rate must be a number .* got None of default"):
        latency_rate([run], Options(x="workload.rate"))
