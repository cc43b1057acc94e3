"""experiments/figure: what the other kinds plot."""

import numpy as np
import pytest

from core.errors import ConfigError
from experiments.figure.choices import (
    ablation,
    kendall_tau,
    mape,
    pareto,
    prediction,
    simulation,
)
from experiments.figure.distributions import RANKS, cdf
from experiments.figure.fairness import fairness
from experiments.figure.memory import BELADY, INFINITE, hit_rate
from experiments.figure.options import Options, one_seed
from experiments.figure.plots import Span
from experiments.figure.times import over_time, steps
from experiments.paper.folders import find_runs
from experiments.paper.metrics import metric
from tests.experiments.paper.run_folders import request, step, write_run

ROWS = [request("a", 0.0, 1.0), request("b", 1.0, 3.0)]


def test_cdf_holds_quantiles_of_completed_requests(tmp_path):
    rows = [*ROWS, request("c", ttft_s=99.0, finish_reason="abort")]
    plot = cdf([write_run(tmp_path, "p", requests=rows)], Options())
    lines = {line.panel: line for line in plot.lines}
    assert list(plot.panels) == ["ttft", "itl", "e2e"]
    assert lines["ttft"].x == pytest.approx(np.quantile([1.0, 3.0], RANKS))
    assert set(lines["itl"].x) == {1.0}
    assert lines["e2e"].x[-1] == 4.0


def test_over_time_adds_preemptions_up_and_shares_the_pool(tmp_path):
    pages = {"pages_free": 2, "pages_tree": 4, "pages_evictable": 2, "pages_request": 4}
    lines = [
        step(0, num_rows=3, waiting=1, **pages),
        step(1, [("preempted", "a", "p", "")], num_rows=2, waiting=2, **pages),
        step(2, [("preempted", "b", "p", "")], num_rows=1, waiting=0, **pages),
    ]
    plot = over_time([write_run(tmp_path, "p", steps=lines)], Options())
    found = {line.panel: line for line in plot.lines}
    assert found["kv"].y == pytest.approx([60.0, 60.0, 60.0])
    assert found["batch"].y == [3.0, 2.0, 1.0]
    assert found["waiting"].y == [1.0, 2.0, 0.0]
    assert found["preemptions"].y == [0.0, 1.0, 2.0]
    assert found["kv"].x == [1.0, 2.0, 3.0]


def test_steps_turn_choices_into_spans(tmp_path):
    lines = [
        step(1, [("admitted", "a", "p", "")]),
        step(2, [("preempted", "a", "p", ""), ("admitted", "b", "p", "")]),
        step(3, [("resumed", "a", "p", "")]),
    ]
    rows = [request("a", 0.0, 4.0), request("b", 0.5, 4.5), request("c", 9.0)]
    plot = steps([write_run(tmp_path, "p", requests=rows, steps=lines)], Options(limit=2))
    assert plot.spans == [
        Span("p", "a", "waiting", 0.0, 1.0),
        Span("p", "a", "running", 1.0, 2.0),
        Span("p", "a", "preempted", 2.0, 3.0),
        Span("p", "a", "running", 3.0, 5.0),
        Span("p", "b", "waiting", 0.5, 2.0),
        Span("p", "b", "running", 2.0, 6.0),
    ]


def test_hit_rate_stands_beside_its_bounds(tmp_path):
    workload = {
        "_target_": "plugins.workload.shared_prefix.SharedPrefix",
        "num_groups": 1,
        "requests_per_group": 4,
        "prefix_tokens": 64,
        "suffix_tokens": 16,
    }
    for size, rate in ((16, 0.0), (1024, 0.5)):
        write_run(
            tmp_path / "runs",
            "lru",
            summary={"hit_rate": rate, "kv": {"page_size": 16}},
            config={"engine": {"pool_tokens": size}, "workload": workload},
        )
    plot = hit_rate(find_runs([tmp_path / "runs"])[0], Options())
    found = {line.label: line for line in plot.lines}
    assert (list(found["lru"].x), list(found["lru"].y)) == ([16.0, 1024.0], [0.0, 50.0])
    # 4 requests ask for 4 pages each (the last token is always computed); 3 of them find all 4
    assert found[INFINITE].y == pytest.approx([75.0, 75.0])
    assert found[BELADY].y == pytest.approx([100 * 3 / 16, 75.0])
    assert plot.labels() == ["lru"]


def test_hit_rate_says_why_there_are_no_bounds(tmp_path):
    workload = {"_target_": "plugins.workload.file.File", "path": str(tmp_path / "nowhere")}
    config = {"engine": {"pool_tokens": 64}, "workload": workload}
    run = write_run(tmp_path, summary={"hit_rate": 0.5, "kv": {"page_size": 16}}, config=config)
    plot = hit_rate([run], Options())
    assert [line.label for line in plot.lines] == ["default"]
    assert "bounds left out" in plot.notes[0]


def test_fairness_gap_is_between_clients_backlogged_through_the_window(tmp_path):
    rows = [
        request("a", 0.0, 1.0, client="x", finished_s=4.0, prompt_tokens=10),
        request("b", 0.0, 3.0, client="y", finished_s=4.0, prompt_tokens=20),
        request("c", 2.5, 1.0, client="z", finished_s=4.0, prompt_tokens=40),
    ]
    gaps = {"a": [0.5, 1.5], "b": [], "c": []}  # tokens: x at 1, 1.5 and 3; y at 3; z at 3.5
    run = write_run(tmp_path, "p", requests=rows, gaps_s=gaps)
    plot = fairness([run], Options(window_s=2.0))
    found = {line.label: line for line in plot.lines}
    assert found["x"].y == [0.0, 10 + 2 * 2, 10 + 3 * 2]
    assert found["y"].y == [0.0, 0.0, 22.0]
    assert found["z"].y == [0.0, 0.0, 42.0]
    assert found["p"].y == [14.0, 20.0]  # z came after the second window had begun
    assert plot.labels() == ["p"]


def test_fairness_needs_two_clients(tmp_path):
    with pytest.raises(ConfigError, match="at least two clients"):
        fairness([write_run(tmp_path, requests=ROWS)], Options())


def test_ablation_is_the_relative_change_paired_by_seed(tmp_path):
    runs = []
    for seed, base, own in ((0, 10.0, 11.0), (1, 20.0, 26.0)):
        for policy, value in (("base", base), ("own", own)):
            summary = {"throughput": {"requests_per_s": value}}
            runs.append(write_run(tmp_path, policy, seed, ROWS, summary))
    options = Options(metrics=(metric("requests_per_s"),), baseline="base")
    (bar,) = ablation(runs, options).bars
    assert (bar.label, bar.samples) == ("own", 2)
    assert bar.value == pytest.approx(20.0)
    with pytest.raises(ConfigError, match="--baseline must be given"):
        ablation(runs, Options())


def test_prediction_sets_error_against_gain(tmp_path):
    predicted = [
        {**row, "predicted_output": length} for row, length in zip(ROWS, (1, 4), strict=True)
    ]
    slow, fast = ({"latency": {"e2e_s": {"mean": value}}} for value in (4.0, 3.0))
    runs = [
        write_run(tmp_path, "base", 0, ROWS, slow),
        write_run(tmp_path, "sjf", 0, predicted, fast),
    ]
    (dot,) = prediction(runs, Options(baseline="base")).dots
    assert dot.label == "sjf"
    assert dot.x == pytest.approx((1 + 2) / 2 / 2)  # both gave 2 tokens
    assert dot.y == pytest.approx(-25.0)
    runs[1] = write_run(tmp_path, "sjf", 0, ROWS, fast)
    with pytest.raises(ConfigError, match=r"a run folder whose requests\.csv has predicted_output"):
        prediction(runs, Options(baseline="base"))


def test_simulation_pairs_by_what_decides_and_scores_the_agreement(tmp_path):
    def write(folder, executor, values):
        return [
            write_run(
                folder,
                policy,
                0,
                summary={"throughput": {"requests_per_s": value}},
                config={"executor": {"_target_": executor}, "engine": {"max_num_seqs": 8}},
            )
            for policy, value in values.items()
        ]

    simulated = write(tmp_path / "s", "Simulated", {"a": 11.0, "b": 18.0, "c": 30.0})
    measured = write(tmp_path / "m", "Torch", {"a": 10.0, "b": 20.0, "d": 5.0})
    options = Options(metrics=(metric("requests_per_s"),), measured=measured)
    plot = simulation(simulated, options)
    assert [(dot.label, dot.x, dot.y) for dot in plot.dots] == [("a", 10, 11), ("b", 20, 18)]
    assert plot.texts["requests_per_s"] == "MAPE 10.0 %, tau 1.00"
    with pytest.raises(ConfigError, match="--measured must be runs with the config and seed"):
        simulation(simulated[2:], options)


def test_agreement_is_that_of_the_definitions():
    assert mape([10, 20, 0], [11, 18, 5]) == pytest.approx(10.0)
    assert mape([0], [1]) is None
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 2, 2], [1, 2, 3]) == pytest.approx(2 / (2 * 3) ** 0.5)
    assert kendall_tau([1, 1], [1, 2]) is None


def test_pareto_needs_two_metrics_and_marks_the_front(tmp_path):
    runs = [
        write_run(
            tmp_path,
            policy,
            summary={
                "throughput": {"output_tokens_per_s": rate},
                "latency": {"e2e_s": {"p99": wait}},
            },
        )
        for policy, rate, wait in (("a", 10.0, 1.0), ("b", 9.0, 2.0))
    ]
    assert [dot.note for dot in pareto(runs, Options()).dots] == ["on the front", ""]
    with pytest.raises(ConfigError, match="two metrics"):
        pareto(runs, Options(metrics=(metric("ttft_p50"),)))


def test_kinds_of_one_run_take_the_lowest_seed_or_the_one_asked(tmp_path):
    runs = [write_run(tmp_path, "p", seed) for seed in (4, 2)]
    assert one_seed(runs, Options())["p"].seed == 2
    assert one_seed(runs, Options(seed=4))["p"].seed == 4
    with pytest.raises(ConfigError, match=r"--seed must be one of \[2, 4\] \(p\), got 3"):
        one_seed(runs, Options(seed=3))
