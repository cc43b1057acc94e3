"""past_future: lengths drawn from what ended, given what is out; the peak they make."""

from array import array

import pytest

from core.errors import ConfigError
from core.queries import RequestEvent, Verdict
from core.records import ChoiceRecord, RequestRecord
from core.request import Request
from plugins.admission.past_future import PastFuture
from plugins.shared.run_info import RunInfo
from tests.core.policy_tables import admission_query, table_of
from tests.engine_harness import Arrival, make_engine, run


def ended(policy, last_step, *lengths, reason="length"):
    """A request that ended, a choice for each length."""
    record = RequestRecord("r", "", 0.0, 10)
    for length in lengths:
        steps = array("q", [*range(length - 1), last_step])
        tokens = array("i", [1] * length)
        record.choices.append(ChoiceRecord(tokens, steps=steps, finish_reason=reason))
    policy.on_request_finished(RequestEvent(Request("r", table_of(1).id), record))


def asked(policy, step, running=None, candidate=None, **facts):
    """The decision, at page size 1: pages are tokens."""
    running = table_of(prompt=[10], known=[14], max_output=[50]) if running is None else running
    candidate = table_of(prompt=[3], max_output=[50]) if candidate is None else candidate
    query = admission_query(running, candidate=candidate, step=step, page_size=1, **facts)
    return policy.decide_admission(query)


def peak(policy, step, **tables):
    words = asked(policy, step, **tables).reason.split()
    return int(words[2]), int(words[5])  # pages, past outputs


def test_without_a_past_everyone_reaches_the_limit():
    # 14 tokens and 46 to come, 3 and 50: the first ends with 59 beside 48; alone the other has 52.
    assert peak(PastFuture(), 0) == (59 + 48, 0)


def test_length_is_one_of_the_past_that_is_longer_than_what_is_out():
    policy = PastFuture()
    ended(policy, 0, 3)
    ended(policy, 0, 9)
    # 4 are out, so it will be 9: 14 + 4 stored at its end. The candidate gets 3 or 9.
    peaks = {peak(policy, step) for step in range(2, 60)}
    assert peaks == {(max(14 + 3 - 1 + 3 + 3 - 1, 14 + 5 - 1), 2), (14 + 5 - 1 + 3 + 5 - 1, 2)}


def test_draws_follow_the_past_and_the_seed():
    def peaks(seed):
        policy = PastFuture()
        policy.on_run_start(RunInfo("test", seed, "", {}, {}, {}))
        for length in (1, 1, 1, 40):
            ended(policy, 0, length)
        running = table_of(prompt=[1], known=[1], max_output=[1])
        candidate = table_of(prompt=[1], max_output=[50])
        return [peak(policy, n, running=running, candidate=candidate)[0] for n in range(2, 402)]

    drawn = peaks(1)
    assert set(drawn) == {2, 40}
    assert 0.17 < drawn.count(40) / len(drawn) < 0.33  # a quarter, four standard deviations
    assert drawn == peaks(1)
    assert drawn != peaks(2)


def test_longer_than_all_the_past_reaches_the_limit():
    policy = PastFuture()
    ended(policy, 0, 4)
    assert peak(policy, 2, candidate=table_of(prompt=[1], max_output=[1]))[0] == 14 + 46 - 1


def test_limit_cuts_what_was_drawn():
    policy = PastFuture()
    ended(policy, 0, 500)
    assert peak(policy, 2)[0] == 59 + 48


def test_output_counts_from_the_second_step_after_its_requests_last():
    policy = PastFuture()
    ended(policy, 7, 5, 6)
    assert peak(policy, 8)[1] == 0
    assert peak(policy, 9)[1] == 2


def test_only_ends_of_their_own_count():
    policy = PastFuture()
    for reason in ("abort", "error", "capacity", "stop", "length"):
        ended(policy, 0, 5, reason=reason)
    assert peak(policy, 2)[1] == 2


def test_history_forgets_the_oldest():
    policy = PastFuture(history=2)
    for step, length in enumerate((40, 6, 6)):
        ended(policy, step, length)
    assert {peak(policy, step) for step in range(4, 40)} == {
        (14 + 2 - 1 + 3 + 2 - 1, 2),
        (15 + 4, 2),
    }


def test_peak_is_held_against_free_evictable_and_own_pages():
    running = table_of(prompt=[10], known=[14], max_output=[50], pages_held=[14])
    have = {"pages_free": 60, "pages_evictable": 33, "pool_pages": 1000}
    assert asked(PastFuture(), 0, running, **have).verdict is Verdict.ADMIT
    have["pages_evictable"] -= 1
    assert asked(PastFuture(), 0, running, **have).verdict is Verdict.WAIT


def test_request_alone_is_admitted_and_history_must_hold_something():
    assert asked(PastFuture(), 0, table_of(0)).verdict is Verdict.ADMIT
    with pytest.raises(ConfigError, match="history must be >= 1, got 0"):
        PastFuture(history=0)


def test_short_outputs_of_the_past_let_more_run_at_once():
    """All ask for 200 tokens and emit 8: at first two fit, later as many as really do."""
    arrivals = [
        Arrival(i, f"r{i}", 16, 200, params={"ignore_eos": False}, fields={"forced_output": 8})
        for i in range(60)
    ]
    out = run(make_engine(pages=28, plugins={"mine": PastFuture()}), arrivals)
    running = [event.record.running for event in out.events]
    assert max(running[:8]) == 2
    assert max(running[30:]) == 8, "engine.max_num_seqs"
    assert out.preemptions() == 0
