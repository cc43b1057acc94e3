"""new_token_ratio: sglang's arithmetic, its decay, its jump after a preemption."""

from dataclasses import replace

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import StepEvent, Verdict
from core.records import Choice, StepRecord
from core.request import Request, SamplingParams
from plugins.admission.new_token_ratio import NewTokenRatio
from tests.core.policy_tables import admission_query, table_of
from tests.core.test_joined_slices import assert_same, prompts
from tests.core.test_joined_slices import make as joining_engine
from tests.core.test_overlap import play, requests
from tests.engine_harness import Arrival, make_engine, run

DECAY = (0.7 - 0.098) / 600


def query(running=None, step=0, candidate=None, **facts):
    """At page size 1: pages are tokens."""
    running = table_of(max_output=[100]) if running is None else running
    return admission_query(running, candidate=candidate, step=step, page_size=1, **facts)


def stepped(policy, step, decoded=True, preempted=False):
    record = StepRecord(step, 0.0, decode_tokens=int(decoded))
    if preempted:
        record.choices.append(Choice("r", 0, "preempted", "p", "why"))
    policy.on_step(StepEvent(record, (), (), np.empty(0, np.int32)))


def ratio(policy, step, **facts):
    policy.decide_admission(query(step=step, **facts))
    return policy.ratio


def test_share_of_what_the_running_may_emit_and_all_of_the_candidate():
    # 0.7 * 100 + 16, and 10 prompt tokens.
    facts = {"pages_needed": 10, "pages_evictable": 40, "pages_promised": 4, "pool_pages": 200}
    admitted = NewTokenRatio().decide_admission(query(pages_free=60, **facts))
    assert admitted.verdict is Verdict.ADMIT
    refused = NewTokenRatio().decide_admission(query(pages_free=59, **facts))
    assert refused.verdict is Verdict.WAIT
    assert refused.reason == "needs 10 + 86 for growth at ratio 0.700, 95 of 200 pages left"


def test_long_limits_are_clipped_and_what_is_out_is_not_expected_again():
    policy = NewTokenRatio(clip_tokens=50)
    running = table_of(prompt=[10, 10], known=[10, 70], max_output=[100, 100])
    reason = policy.decide_admission(query(running)).reason
    assert reason.startswith(f"needs 0 + {35 + 28 + 16} for growth")


def test_those_admitted_in_the_same_step_count_in_full():
    policy = NewTokenRatio()
    first = table_of(max_output=[100], admitted_order=[5])
    assert "0 + 86 for" in policy.decide_admission(query(first, step=3)).reason
    both = table_of(max_output=[100, 100], admitted_order=[5, 6])
    assert "0 + 186 for" in policy.decide_admission(query(both, step=3)).reason
    assert "0 + 156 for" in policy.decide_admission(query(both, step=4)).reason


def test_requests_that_ignore_end_tokens_count_in_full():
    asked = replace(
        query(),
        request=lambda one: Request("r", np.ones(3, np.int32), SamplingParams(ignore_eos=True)),
    )
    assert "0 + 116 for" in NewTokenRatio().decide_admission(asked).reason


def test_choices_to_come_count_as_requests():
    running = table_of(max_output=[100], forks=[2])
    candidate = table_of(max_output=[16], forks=[1])
    assert "0 + 242 for" in NewTokenRatio().decide_admission(query(running, 0, candidate)).reason


def test_ratio_sinks_with_decode_steps_to_its_floor():
    policy = NewTokenRatio()
    for step in range(300):
        stepped(policy, step)
    assert ratio(policy, 301) == pytest.approx(0.7 - 300 * DECAY)
    for step in range(300, 900):
        stepped(policy, step)
    assert ratio(policy, 901) == pytest.approx(0.098)


def test_steps_that_went_in_one_count_each():
    policy = NewTokenRatio()
    record = StepRecord(5, 0.0, steps=10, decode_tokens=40)
    policy.on_step(StepEvent(record, (), (), np.empty(0, np.int32)))
    assert ratio(policy, 15) == pytest.approx(0.7 - 9 * DECAY)
    assert ratio(policy, 16) == pytest.approx(0.7 - 10 * DECAY)


@pytest.mark.parametrize(("num_decodes", "counted"), [(0, 6), (1, 10)])
def test_slices_alone_are_no_decodes_of_steps_that_went_in_one(num_decodes, counted):
    policy, rows = NewTokenRatio(), 2 + num_decodes  # two prompts of four slices each
    facts = {"num_rows": rows, "decode_tokens": 2 * 6 + num_decodes * 10}
    record = StepRecord(5, 0.0, steps=10, slices=4, **facts)
    policy.on_step(StepEvent(record, (), (), np.empty(0, np.int32)))
    assert ratio(policy, 16) == pytest.approx(0.7 - counted * DECAY)


def test_ratio_is_the_same_where_steps_go_in_one():
    def one():
        return joining_engine({"mine": NewTokenRatio()}, pages=90)

    assert_same(one, prompts())


def test_steps_without_a_decode_leave_the_ratio():
    policy = NewTokenRatio()
    for step in range(50):
        stepped(policy, step, decoded=step % 2 == 0)
    assert ratio(policy, 51) == pytest.approx(0.7 - 25 * DECAY)


def test_step_counts_from_the_second_after_it_with_and_without_overlap():
    policy = NewTokenRatio()
    stepped(policy, 0)
    assert ratio(policy, 1) == 0.7  # its event has come: launches do not overlap
    assert ratio(policy, 2) == pytest.approx(0.7 - DECAY)


def test_preemption_sets_the_ratio_by_those_that_run_on():
    policy = NewTokenRatio()
    stepped(policy, 10, preempted=True)
    running = table_of(prompt=[10, 10], known=[40, 20], max_output=[100, 100])
    assert ratio(policy, 11, running=running) == 0.7
    assert ratio(policy, 12, running=running) == pytest.approx((40 + 2 * 20) / (200 + 1))
    nearly_done = table_of(prompt=[10], known=[105], max_output=[100])
    stepped(policy, 12, preempted=True)
    assert ratio(policy, 14, running=nearly_done) == 1.0


def test_victim_that_asks_to_come_back_counts_at_once_and_once():
    policy = NewTokenRatio()
    running = table_of(prompt=[10], known=[40], max_output=[100])
    victim = table_of(preemptions=[1], last_step=[9])
    jump = (30 + 20) / 101
    assert ratio(policy, 11, running=running, candidate=victim) == pytest.approx(jump)
    stepped(policy, 10, preempted=True)
    assert ratio(policy, 12, running=running, candidate=victim) == pytest.approx(jump - DECAY)
    assert ratio(policy, 13, running=running, candidate=victim) == pytest.approx(jump - DECAY)


def test_idle_engine_starts_again_and_lets_a_request_in():
    policy = NewTokenRatio()
    for step in range(100):
        stepped(policy, step)
    alone = query(table_of(0), step=101, pages_needed=500)
    assert policy.decide_admission(alone).verdict is Verdict.ADMIT
    assert policy.ratio == 0.7


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"start": 0.0}, r"start must be in \(0, 1\], got 0.0"),
        ({"floor_share": 1.1}, r"floor_share must be in \[0, 1\], got 1.1"),
        ({"decay_steps": 0}, "decay_steps must be >= 1, got 0"),
        ({"headroom_tokens": -1}, "headroom_tokens must be >= 0, got -1"),
        ({"clip_tokens": 0}, "clip_tokens must be >= 1, got 0"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        NewTokenRatio(**arguments)


def test_it_holds_back_more_after_a_preemption_than_before():
    policy = NewTokenRatio(start=0.02)
    arrivals = [Arrival(i, f"r{i}", 30, 60, params={"ignore_eos": False}) for i in range(12)]
    out = run(make_engine(pages=16, plugins={"mine": policy}), arrivals)
    assert out.preemptions() > 0
    assert 0.2 < policy.ratio <= 1.0


def test_overlap_changes_no_decision_when_it_preempts():
    runs = [
        play(
            make_engine(pages=16, overlap=overlap, plugins={"mine": NewTokenRatio(start=0.02)}),
            requests(ignore_eos=False, choices=3),
        )
        for overlap in (False, True)
    ]
    assert any(kind == "preempted" for step in runs[0] for _, _, kind, *_ in step[1])
    assert runs[0] == runs[1]
