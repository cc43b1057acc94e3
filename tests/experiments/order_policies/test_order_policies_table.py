"""The table of orders, from summaries with known figures, and from small runs."""

import pytest

from core.errors import ConfigError
from experiments.order_policies.table import main
from tests.experiments.paper.run_folders import write_run

QUIET = ("~sinks.figures", "~sinks.timeline", "~sinks.console")


def summary(normalised_s, attainment):
    latency = {
        "normalised_s": {"mean": normalised_s},
        "ttft_s": {"p50": 1.0, "p99": 2.0},
        "e2e_s": {"mean": 3.0},
    }
    slo = {"attainment": attainment, "target": 0.9}
    return {"latency": latency, "slo": slo, "hit_rate": 0.5, "preemptions": 4}


def run(folder, policy, rate, normalised_s, attainment, seed=0):
    config = {"workload": {"rate": rate}}
    write_run(folder, policy, seed, summary=summary(normalised_s, attainment), config=config)


def test_least_normalised_latency_comes_first_at_each_rate(tmp_path):
    for rate in (2.0, 4.0):
        run(tmp_path, "slow", rate, 0.05 * rate, 1.0)
        run(tmp_path, "quick", rate, 0.02 * rate, 1.0)
    parts = main([tmp_path]).split("\n\n")
    assert parts[0] == "toy at rate 2"
    assert parts[1].splitlines()[2:] == [
        "| quick | 1 | 40 | 1.00 | 2.00 | 3.00 | 100.0 | 50.0 | 4 |",
        "| slow | 1 | 100 | 1.00 | 2.00 | 3.00 | 100.0 | 50.0 | 4 |",
    ]
    assert parts[2] == "toy at rate 4"


def test_goodput_is_where_the_curve_of_a_seed_crosses_the_target(tmp_path):
    for seed, last in ((0, 0.8), (1, 0.4)):  # from 1.0 at 2 to `last` at 4, through 0.9
        run(tmp_path, "mine", 2.0, 0.1, 1.0, seed)
        run(tmp_path, "mine", 4.0, 0.1, last, seed)
    rows = main([tmp_path]).split("toy, goodput\n\n")[1].splitlines()
    assert rows[0] == "| order | rate at which 90% keep the SLO |"
    # 2 + 2 * 0.1 / 0.2 = 3 and 2 + 2 * 0.1 / 0.6 = 2.33; t with one degree of freedom: 12.706
    assert rows[2] == "| mine | 2.67 ± 4.24 |"


def test_one_rate_tells_no_goodput(tmp_path):
    run(tmp_path, "mine", 2.0, 0.1, 0.5)
    assert "goodput" not in main([tmp_path])


def test_runs_without_a_rate_are_refused(tmp_path):
    write_run(tmp_path, "mine", summary=summary(0.1, 1.0), config={"workload": {"rate": None}})
    with pytest.raises(ConfigError, match="runs with a rate"):
        main([tmp_path])


def test_orders_differ_where_requests_wait_and_equal_limits_are_fcfs(command, tmp_path):
    """A hundred requests of the trace at sixty times their rate, four places: all state the same
    maximum, so sjf without the truth is first come, first served."""
    small = ("workload.num_requests=100", "workload.rate_scale=60", "engine.max_num_seqs=4")
    orders = "+policy=fcfs,[sjf,max_tokens_share],[sjf,oracle]"
    assert command("-m", "+experiment=order_policies", *small, orders, *QUIET).code == 0
    rows = main([tmp_path / "outputs"]).split("\n\n")[1].splitlines()[2:]
    cells = {row.split("|")[1].strip(): row.split("|")[3:] for row in rows}
    assert cells["fcfs"] == cells["max_tokens_share+sjf"]
    assert float(cells["oracle+sjf (oracle)"][0]) < float(cells["fcfs"][0])


def test_longest_prefix_finds_more_where_the_pool_holds_few_groups(command, tmp_path):
    """Prompts of eight groups at once, a pool for three of them."""
    small = ("workload.num_groups=8", "workload.requests_per_group=6", "workload.max_tokens=8")
    sizes = ("workload.prefix_tokens=256", "workload.suffix_tokens=16", "engine.pool_tokens=1024")
    load = ("seed=0", "workload.rate=1000", "engine.max_model_len=512", *small, *sizes)
    orders = "+policy=fcfs,longest_prefix"
    assert command("-m", "+experiment=order_policies_prefix", *load, orders, *QUIET).code == 0
    rows = main([tmp_path / "outputs"]).split("\n\n")[1].splitlines()[2:]
    hits = {row.split("|")[1].strip(): float(row.split("|")[8]) for row in rows}
    assert hits["longest_prefix"] > hits["fcfs"]
