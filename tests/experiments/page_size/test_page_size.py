"""The table of page sizes, from summaries and from small runs, and the load of the host's times."""

from experiments.page_size.planning import step_us
from experiments.page_size.table import main
from plugins.workload.shared_prefix import SharedPrefix
from tests.experiments.paper.run_folders import write_run

TINY = (
    *("+experiment=page_size", "executor=fake", "seed=0", "workload.num_groups=2"),
    *("workload.requests_per_group=4", "workload.prefix_tokens=40", "workload.suffix_tokens=8"),
    *("workload.max_tokens=4", "workload.rate=0.1", "engine.pool_tokens=4096"),
    *("~sinks.figures", "~sinks.timeline", "~sinks.console"),
)


def summary(page_size, hit_rate):
    return {
        "kv": {"page_size": page_size},
        "hit_rate": hit_rate,
        "waste": {"total": 0.01},
        "preemptions": 2,
        "recompute_tax": 0.25,
        "batch": {"batch_mean": 3.0},
        "latency": {"ttft_s": {"p50": 1.0}},
        "throughput": {"output_tokens_per_s": 5000.0},
    }


def test_sizes_of_each_pool_stand_below_one_another(tmp_path):
    for pool in (1024, "auto"):
        for size, rate in ((256, 0.5), (16, 0.8)):
            config = {"engine": {"pool_tokens": pool}}
            write_run(tmp_path, f"p{pool}", summary=summary(size, rate), config=config)
    small, whole = main([tmp_path]).split("\n\nengine.pool_tokens=auto\n\n")
    assert small.splitlines()[4:] == [
        "| 16 | 1 | 80.0 | 1.0 | 2 | 25.0 | 3.0 | 1.00 | 5,000 |",
        "| 256 | 1 | 50.0 | 1.0 | 2 | 25.0 | 3.0 | 1.00 | 5,000 |",
    ]
    assert len(whole.splitlines()) == 4


def test_larger_pages_find_whole_pages_of_a_prefix_alone(command, tmp_path):
    """Ten seconds apart, six of eight prompts of 48 tokens find 40, 32 or, of pages of 64, none."""
    assert command("-m", *TINY, "allocator.page_size=1,16,64").code == 0
    rows = [line.split("|") for line in main([tmp_path / "outputs"]).splitlines()[4:]]
    assert [(row[1].strip(), row[3].strip()) for row in rows] == [
        ("1", f"{100 * 6 * 40 / (8 * 48):.1f}"),
        ("16", f"{100 * 6 * 32 / (8 * 48):.1f}"),
        ("64", "0.0"),
    ]


def test_every_size_serves_the_load_whose_host_time_is_taken():
    load = SharedPrefix(2, 2, prefix_tokens=300, suffix_tokens=4, max_tokens=3)
    assert all(step_us(load, size) > 0 for size in (1, 256))
