"""The table of waiting times under each batching."""

from experiments.chunked_prefill.table import main
from tests.experiments.paper.run_folders import write_run


def test_least_gap_comes_first_in_milliseconds(tmp_path):
    for batching, p99_s in (("prefill_first", 0.09), ("chunked", 0.02)):
        latency = {
            "itl_s": {"p50": 0.005, "p99": p99_s, "max": 0.2},
            "ttft_s": {"p50": 0.015, "p99": 0.1},
            "e2e_s": {"p50": 1.5},
        }
        summary = {
            "hooks": {"decide_batch": batching},
            "latency": latency,
            "throughput": {"output_tokens_per_s": 3500.0},
        }
        write_run(tmp_path, summary=summary)
    rows = main([tmp_path]).splitlines()[2:]
    assert rows[0] == "| chunked | 1 | 5.0 | 20.0 | 200 | 15 | 100 | 1.50 | 3,500 |"
    assert rows[1] == "| prefill_first | 1 | 5.0 | 90.0 | 200 | 15 | 100 | 1.50 | 3,500 |"
