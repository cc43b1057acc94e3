"""Service of clients that wait, worked out by hand, and the table beside the published figures."""

import pytest

from experiments.fairness.service import service
from experiments.fairness.table import heavy, main, measured, spearman
from experiments.paper.folders import find_runs
from tests.experiments.paper.run_folders import request, write_run


def waiting(name, client, arrival_s, admitted_s, prompt_tokens, output_tokens=2):
    first = {"ttft_s": admitted_s - arrival_s, "admitted_s": admitted_s}
    sizes = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    return request(name, arrival_s, client=client, **first, **sizes)


@pytest.fixture
def run(tmp_path):
    """Windows of 10 s up to 20: a waits all through both, b through the first, c through none."""
    requests = [
        waiting("a0", "a", 0.0, 6.0, 10),  # served in window 0: 10 + 2 * 2
        waiting("a1", "a", 5.0, 30.0, 100),  # after the last arrival
        waiting("b0", "b", 0.0, 9.5, 7),  # a token each in windows 0 and 1
        waiting("b1", "b", 9.0, 12.0, 20),  # window 1: 20 + 4
        waiting("c0", "c", 20.0, 20.0, 1),
    ]
    return write_run(tmp_path, "fcfs", requests=requests, summary={"recompute_tax": 0.0, **pool()})


def pool():
    return {"kv": {"pool_pages": 4, "page_size": 16}}


def test_service_counts_prompts_at_the_first_token_and_outputs_twice(run):
    found = service(run, 10.0)
    assert found.clients == ["a", "b", "c"]
    assert found.served.tolist() == [[14.0, 0.0], [9.0, 26.0], [0.0, 3.0]]


def test_only_clients_that_wait_all_through_a_window_are_compared(run):
    found = service(run, 10.0)
    assert found.waited.tolist() == [[True, True], [True, False], [False, False]]
    assert found.gaps().tolist() == [5.0]  # 14 - 9
    assert found.jain().tolist() == [pytest.approx(23**2 / (2 * (14**2 + 9**2)))]


def test_load_without_a_backlog_shows_no_gap(tmp_path):
    requests = [waiting("a", "a", 0.0, 0.0, 10), waiting("b", "b", 20.0, 20.0, 10)]
    summary = {"recompute_tax": 0.0, **pool()}
    write_run(tmp_path, "mine", requests=requests, summary=summary)
    row = main([tmp_path], 10.0).splitlines()[2]
    assert row == "| mine | 1.0 | 1.0 | 1.0 | 1.0 | 0.0 | - | - | - | 0.0 |  |"


def test_clients_with_half_of_the_service_are_heavy(run):
    assert heavy(run.requests) == {"a"}  # 110 + 8 of 146 + 2 * 5


def test_published_means_are_those_of_the_traces_page():
    means = {name: measured()[f"latency_s_{name}"].mean() for name in ("fcfs", "lcf", "vtc")}
    rounded = {name: round(float(value), 1) for name, value in means.items()}
    assert rounded == {"fcfs": 58.2, "lcf": 52.8, "vtc": 51.2}


def test_ranks_alone_count_for_the_order_of_clients():
    assert spearman([1.0, 2.0, 30.0], [5.0, 60.0, 61.0]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 30.0], [7.0, 6.0, 5.0]) == pytest.approx(-1.0)


def test_ten_clients_get_more_equal_service_under_vtc(command, tmp_path):
    """The trace's first 200 requests, at ten times their rate, on the experiment's device."""
    small = ("workload.num_requests=200", "workload.rate_scale=10", "+policy=fcfs,vtc")
    quiet = ("~sinks.figures", "~sinks.timeline", "~sinks.console")
    assert command("-m", "+experiment=fairness", *small, *quiet).code == 0
    folder = tmp_path / "outputs"
    runs, _ = find_runs([folder])
    jain = {run.policy: service(run, 2.0).jain().mean() for run in runs}
    assert jain["vtc"] > jain["fcfs"]
    ours, bound, theirs = main([folder], window_s=2.0).split("\n\n")
    assert [line.split()[1] for line in ours.splitlines()[2:]] == ["vtc", "fcfs"]
    assert bound.endswith("40,000")  # 2 * 2 * 10,000 slots
    assert theirs.splitlines()[2].startswith("| vtc | 51.2 |")
