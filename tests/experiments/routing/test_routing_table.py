"""The table of routers, from summaries with known figures."""

from pathlib import Path

from experiments.routing.table import main
from tests.experiments.paper.run_folders import write_run


def summary(router, mean_s, replicas=8, pooled=None, regret_s=0.5):
    latency = {"ttft_s": {"mean": mean_s, "p50": 1.0, "p99": 9.0}, "e2e_s": {"p50": 2, "p99": 3}}
    routed = {
        "count": replicas,
        "router": router,
        "load_cv": 0.25,
        "busy_cv": 0.125,
        "regret_s": None if regret_s is None else {"mean": regret_s},
        "best_share": None if regret_s is None else 0.5,
    }
    simulated = {"source": "roofline"} | ({"pooled": pooled} if pooled else {})
    more = {} if pooled else {"replicas": routed}
    return {
        "workload": "mooncake_conversation",
        "latency": latency,
        "hit_rate": 0.125,
        "simulated": simulated,
        **more,
    }


def write(folder: Path, policy: str, seed: int, **figures):
    write_run(
        folder, policy, seed, summary=summary(**figures), config={"workload": {"rate_scale": 2.0}}
    )


def test_routers_are_ranked_in_each_setting_with_the_bound_beside_them(tmp_path):
    for seed, wait_s in enumerate((1.0, 3.0)):
        write(tmp_path, "round_robin", seed, router="round_robin", mean_s=wait_s)
        write(tmp_path, "kv_headroom", seed, router="kv_headroom", mean_s=wait_s / 2)
    write(tmp_path, "earliest_start (oracle)", 0, router="earliest_start", mean_s=0.75)
    write(tmp_path, "default", 0, router="", mean_s=0.25, pooled=8)
    write(tmp_path, "lmetric", 0, router="lmetric", mean_s=4.0, replicas=64)
    small, large = main([tmp_path]).split("\n\nmooncake_conversation, 64 replicas, rate 2\n\n")
    assert small.startswith(
        "mooncake_conversation, 8 replicas, rate 2\n\n| router | TTFT mean, s |"
    )
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in small.splitlines()[4:]]
    names = ["(pooled: the bound)", "earliest_start (oracle)", "kv_headroom", "round_robin"]
    assert [row[0] for row in cells] == names
    # t with one degree of freedom: 12.706 * 1.41421 / sqrt(2) for the spread of 1 and 3
    assert [row[1] for row in cells] == ["0.25", "0.75", "1.00 ± 6.35", "2.00 ± 12.71"]
    assert cells[0][6:] == ["12.5", "", "", "", ""]
    assert cells[1][6:] == ["12.5", "0.25", "0.12", "0.50", "50"]
    assert "| lmetric | 4.00 | 1.00 | 9.0 |" in large


def test_a_run_without_regret_has_no_such_cells(tmp_path):
    write(tmp_path, "lmetric", 0, router="lmetric", mean_s=4.0, regret_s=None)
    assert main([tmp_path]).endswith("| 12.5 | 0.25 | 0.12 |  |  |")
