"""plugins/shared/metrics.py and plugins/mode/summary.py against hand-computed values."""

import json
from array import array
from typing import Any

import numpy as np
import pytest

from core.records import Choice, ChoiceRecord, RequestRecord, StepRecord
from plugins.mode.samples import distribution
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import jain_index, summarise
from plugins.shared.measure import Measure, Slo, window_of
from plugins.shared.metrics import token_gaps_s, tpot_s, ttft_s


def request(name: str, times: list[float], **fields: Any) -> RequestRecord:
    """A completed request with one token at each of `times`."""
    choice = ChoiceRecord(
        array("i", range(len(times))),
        array("d", times),
        array("q", range(len(times))),
        [],
        "length",
    )
    values = {
        "client": "",
        "arrival_s": 0.0,
        "prompt_tokens": 10,
        "admitted_s": 0.0,
        "finished_s": times[-1] if times else 0.0,
        "finish_reason": "length",
        "choices": [choice],
    }
    return RequestRecord(request_id=name, **(values | fields))


def step(start_s: float, end_s: float, **fields: Any) -> StepRecord:
    return StepRecord(step=0, start_s=start_s, end_s=end_s, **fields)


def totals(*records: StepRecord, page_size: int = 4, pool_pages: int = 10) -> StepTotals:
    out = StepTotals(page_size, pool_pages)
    for record in records:
        out.add(record)
    return out


def test_latencies_follow_their_definitions() -> None:
    one = request("a", [3.0, 3.5, 5.0], arrival_s=1.0, admitted_s=2.0)
    assert ttft_s(one) == 2.0
    assert tpot_s(one) == pytest.approx((4.0 - 2.0) / 2)
    assert token_gaps_s([one]).tolist() == [0.5, 1.5]
    latency = summarise([one], totals())["latency"]
    assert latency["e2e_s"]["p50"] == 4.0
    assert latency["queue_s"]["p50"] == 1.0
    assert latency["normalised_s"]["mean"] == pytest.approx(4.0 / 3)


def test_itl_counts_every_gap_and_tpot_one_sample_a_request() -> None:
    records = [request("a", [1.0, 2.0, 3.0, 4.0]), request("b", [1.0, 1.5]), request("c", [9.0])]
    latency = summarise(records, totals())["latency"]
    assert latency["itl_s"]["count"] == 4
    assert latency["tpot_s"]["count"] == 2  # none for the request of one token
    assert latency["ttft_s"]["count"] == 3


def test_gaps_of_two_choices_are_not_mixed() -> None:
    one = request("a", [1.0, 2.0])
    other = ChoiceRecord(array("i", [5, 6]), array("d", [1.5, 4.5]), array("q", [0, 1]))
    one.choices.append(other)
    assert sorted(token_gaps_s([one]).tolist()) == [1.0, 3.0]
    assert ttft_s(one) == 1.0


def test_only_completed_requests_enter_percentiles_and_reasons_sum_to_accepted() -> None:
    good = request("good", [1.0, 2.0])
    aborted = request("aborted", [50.0, 90.0], finish_reason="abort", finished_s=100.0)
    refused = request("refused", [], finish_reason="capacity", admitted_s=None)
    broken = request("broken", [70.0], finish_reason="error")
    running = request("running", [80.0], finish_reason="", finished_s=None)
    summary = summarise([good, aborted, refused, broken, running], totals())
    requests = summary["requests"]
    assert sum(requests["finish_reasons"].values()) + requests["unfinished"] == 5
    assert requests["accepted"] == 5
    assert requests["completed"] == 1
    assert summary["latency"]["ttft_s"]["max"] == 1.0
    assert summary["latency"]["itl_s"]["count"] == 1
    assert summary["tokens"]["output"] == 2
    assert summary["tokens"]["output_of_incomplete"] == 2 + 1 + 1
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(2 / 100.0)


def test_hit_rate_leaves_out_resumed_hits_and_requests_never_admitted() -> None:
    first = request("a", [1.0], cached_tokens=4, resumed_cached_tokens=9)
    second = request("b", [1.0])
    never = request("c", [], finish_reason="abort", admitted_s=None, prompt_tokens=1000)
    assert summarise([first, second, never], totals())["hit_rate"] == pytest.approx(4 / 20)


def test_recompute_tax_is_a_share_of_all_computed_tokens() -> None:
    steps = totals(
        step(0, 1, prefill_tokens=30, recomputed_tokens=10),
        step(1, 2, prefill_tokens=0, decode_tokens=10),
    )
    summary = summarise([], steps)
    assert summary["recompute_tax"] == pytest.approx(10 / 40)
    assert summary["tokens"]["computed"] == 40


def test_waste_is_weighted_by_time_internal_and_external_apart() -> None:
    # Pool of 40 slots. 1 s with 5 pages = 20 slots, 8 live; 3 s with 2 pages = 8 slots, all live.
    steps = totals(
        step(0, 1, pages_request=5, used_tokens=8, external_tokens=12),
        step(1, 4, pages_request=2, used_tokens=8),
    )
    waste = summarise([], steps)["waste"]
    reserved = 20 * 1 + 8 * 3
    assert waste["internal"] == pytest.approx(12 / reserved)
    assert waste["external"] == pytest.approx(12 / (40 * 4))
    assert waste["total"] == pytest.approx((12 + 12) / (reserved + 12))


def test_cached_pages_are_reserved_not_wasted_and_live_only_while_locked() -> None:
    steps = totals(step(0, 2, pages_tree=6, pages_evictable=4, pages_request=1, used_tokens=3))
    summary = summarise([], steps)
    assert summary["waste"]["internal"] == pytest.approx(1 / 28)
    assert summary["kv"]["reserved_mean"] == pytest.approx(28 / 40)
    assert summary["kv"]["live_mean"] == pytest.approx((2 * 4 + 3) / 40)


def test_levels_ignore_idle_time_and_do_not_count_overlap_twice() -> None:
    steps = totals(
        step(0.0, 1.0, num_rows=2),
        step(0.5, 2.0, num_rows=4),  # launched while the first ran: 1 s of its own
        step(10.0, 11.0, num_rows=6),  # after 8 idle seconds
    )
    batch = summarise([], steps)["batch"]
    assert steps.busy_s == pytest.approx(3.0)
    assert batch["batch_mean"] == pytest.approx((2 + 4 + 6) / 3)
    assert batch["batch_peak"] == 6


def test_step_sums_count_preemptions_evictions_and_host_time() -> None:
    gone = [Choice("a", 0, "preempted", "p", "r"), Choice("b", 0, "refused", "p", "r")]
    steps = totals(
        step(0, 1, choices=gone, pages_evicted=3, host_us={"plan": 10.0, "pack": 2.0}),
        step(1, 2, duplicate_prefill_tokens=7, host_us={"plan": 30.0}),
    )
    summary = summarise([], steps)
    assert summary["preemptions"] == 1
    assert summary["evicted_pages"] == 3
    assert summary["tokens"]["duplicate_prefill"] == 7
    assert summary["steps"]["host_us_mean"] == {"pack": 1.0, "plan": 20.0}


def test_graphs_are_counted_by_launches_and_tokens() -> None:
    steps = totals(
        step(0.0, 1.0, num_rows=5, decode_tokens=5),
        step(1.0, 2.0, num_rows=5, decode_tokens=5, graph_tokens=8),
        step(2.0, 3.0, num_rows=4, decode_tokens=4, graph_tokens=4),
        step(3.0, 4.0, num_rows=4, decode_tokens=3, prefill_tokens=24, graph_tokens=32),
        step(4.0, 5.0, num_rows=2, decode_tokens=6, graph_tokens=4, steps=3),
        step(5.0, 6.0),
    )
    graphs = summarise([], steps)["graphs"]
    assert graphs == {"launches": 7, "hit_rate": 6 / 7, "padding_share": 14 / 56}
    assert summarise([], totals())["graphs"]["hit_rate"] is None


def test_step_totals_keep_nothing_of_a_record() -> None:
    steps = StepTotals(4, 10)
    sizes = set()
    for index in range(50):
        steps.add(step(index, index + 1, rows=[("a", 0, 1)] * index, host_us={"plan": 1.0}))
        sizes.add(sum(map(len, (steps.counts, steps.host_us, steps.integrals, steps.peaks))))
    assert len(sizes) == 1
    assert steps.steps == 50


def test_warm_up_and_drain_enter_no_figure_but_are_counted() -> None:
    window = window_of([0.0, 5.0, 8.0, 9.0], Measure(warm_up=0.25, drain=0.25))
    cut = StepTotals(4, 10, measure_from_s=window.from_s, measure_to_s=window.to_s)
    for start_s, tokens in ((0, 100), (5, 1), (8, 2), (9, 200)):
        cut.add(step(start_s, start_s + 1, decode_tokens=tokens))
    records = [
        request("warm", [1.0, 6.0]),
        request("real", [6.0, 7.0], arrival_s=5.0),
        request("last", [8.5, 20.0], arrival_s=8.0),
        request("dry", [9.5], arrival_s=9.0),
    ]
    summary = summarise(records, cut, window)
    assert summary["measured"] == {"from_s": 5.0, "to_s": 8.0, "left_out": 2}
    assert summary["requests"]["accepted"] == 2
    assert summary["latency"]["ttft_s"]["max"] == 1.0
    assert summary["tokens"]["computed"] == 3
    assert summary["duration_s"] == 3.0
    # within 5 .. 8 s: a token of warm and two of real; real began and ended, warm ended
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(3 / 3)
    assert summary["throughput"]["total_tokens_per_s"] == pytest.approx((3 + 10) / 3)
    assert summary["throughput"]["requests_per_s"] == pytest.approx(2 / 3)


def test_nothing_is_cut_by_default() -> None:
    records = [request("a", [1.0])]
    summary = summarise(records, totals(), window_of([0.0], Measure()))
    assert summary == summarise(records, totals())
    assert summary["measured"] == {"from_s": None, "to_s": None, "left_out": 0}
    assert summary["slo"] is None


def test_attainment_is_over_all_requests_that_count() -> None:
    records = [
        request("good", [1.0, 2.0]),
        request("late", [5.0, 6.0]),
        request("refused", [], finish_reason="capacity"),
        request("slow", [1.0, 9.0]),
    ]
    slo = Slo(ttft_s=2.0, tpot_s=3.0)
    found = summarise(records, totals(step(0, 10)), None, slo)["slo"]
    assert found["attainment"] == 1 / 4
    assert found["requests_per_s"] == pytest.approx(1 / 10)
    assert (found["target"], found["ttft_s"], found["itl_s"]) == (0.9, 2.0, None)


def test_empty_run_gives_none_never_nan() -> None:
    summary = summarise([], totals())
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text) == summary
    assert summary["hit_rate"] is None
    assert summary["latency"]["ttft_s"] == {
        "count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None
    }  # fmt: skip
    assert summary["throughput"]["output_tokens_per_s"] is None


def test_summary_of_a_run_is_json_safe() -> None:
    records = [request("a", [1.0, 2.0], client="x"), request("b", [1.0], client="y")]
    summary = summarise(records, totals(step(0, 1, pages_request=1, used_tokens=1)))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_request_without_output_has_no_ttft_and_no_normalised_latency() -> None:
    empty = request("a", [], finish_reason="length", finished_s=1.0)
    latency = summarise([empty], totals())["latency"]
    assert latency["ttft_s"]["count"] == latency["normalised_s"]["count"] == 0
    assert latency["e2e_s"]["count"] == 1


def test_jain_index_of_service_over_clients() -> None:
    assert jain_index([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0]) == pytest.approx(0.5)
    assert jain_index([3.0]) is None
    assert jain_index([0.0, 0.0]) is None
    a, b = request("a", [1.0, 2.0], client="x"), request("b", [1.0], client="y")
    fairness = summarise([a, b], totals())["fairness"]
    x, y = 10 + 2 * 2, 10 + 2 * 1
    assert fairness == {
        "clients": 2,
        "jain_index": pytest.approx((x + y) ** 2 / (2 * (x * x + y * y))),
    }
    assert summarise([a], totals())["fairness"]["jain_index"] is None


def test_distribution_interpolates_and_skips_none() -> None:
    values = distribution([None, *np.arange(101.0).tolist()])
    assert (values["count"], values["p50"], values["p90"], values["p99"]) == (101, 50, 90, 99)
    assert values["max"] == 100
