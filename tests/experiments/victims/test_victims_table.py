"""The table of victim policies, from summaries with known figures."""

from experiments.victims.table import main
from tests.experiments.paper.run_folders import write_run


def summary(pool_pages, tax, tokens_per_s):
    latency = {"ttft_s": {"p50": 1.0}, "e2e_s": {"mean": 2.0, "p99": 3.0}}
    return {
        "preemptions": 7,
        "requests_preempted": 5,
        "recompute_tax": tax,
        "throughput": {"output_tokens_per_s": tokens_per_s},
        "latency": latency,
        "kv": {"pool_pages": pool_pages, "page_size": 16},
    }


def test_policies_are_ranked_by_tax_in_each_pool_beside_the_reference(tmp_path):
    for seed, tax in enumerate((0.10, 0.12)):
        write_run(tmp_path, "careless", seed, summary=summary(64, 3 * tax, 800.0))
        write_run(tmp_path, "careful", seed, summary=summary(64, tax, 900.0))
        oracle = summary(64, 0.0, 1000.0)
        write_run(tmp_path, "mc_sf+oracle (oracle)", seed, summary=oracle)
    write_run(tmp_path, "careful", summary=summary(128, 0.05, 950.0))
    small, large = main([tmp_path]).split("\n\nPool of 2,048 slots\n\n")
    assert small.startswith("Pool of 1,024 slots\n\n| policy | runs | preemptions |")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in small.splitlines()[4:]]
    assert [row[0] for row in cells] == ["mc_sf+oracle (oracle)", "careful", "careless"]
    assert [row[1] for row in cells] == ["2", "2", "2"]
    # t with one degree of freedom: 12.706 * 1.41421 / sqrt(2), in points of the tax
    assert [row[4] for row in cells] == ["0.0 ± 0.0", "11.0 ± 12.7", "33.0 ± 38.1"]
    assert [row[-1] for row in cells] == ["1.000", "0.900", "0.800"]
    assert "| careful | 1 | 7 | 5 | 5.0 | 1.00 | 2.00 | 3.00 | 950 |  |" in large
