"""plugins/shared/measure.py: what counts, and what a request was promised."""

import math
from array import array

import pytest

from core.errors import ConfigError
from core.records import ChoiceRecord, RequestRecord
from plugins.shared.measure import Measure, Slo, Window, tokens_within, window_of


def record(times, reason="length", choices=1):
    streams = [
        ChoiceRecord(array("i", range(len(times))), array("d", times)) for _ in range(choices)
    ]
    end = times[-1] if times else 0.0
    return RequestRecord("r", "", 0.0, 5, finished_s=end, finish_reason=reason, choices=streams)


def test_window_lies_between_the_first_and_last_request_that_count():
    window = window_of([float(second) for second in range(10)], Measure(0.2, 0.3))
    assert (window.from_s, window.to_s) == (2.0, 6.0)
    assert [window.holds(at) for at in (1.9, 2.0, 6.0, 6.1)] == [False, True, True, False]


def test_window_is_found_while_requests_arrive():
    window = Window(4, Measure(0.25, 0.25))
    seen = []
    for arrival_s in (0.0, 1.0, 2.0, 3.0):
        window.arrived(arrival_s)
        seen.append((window.from_s, window.to_s))
    assert seen == [(math.inf, math.inf), (1.0, math.inf), (1.0, 2.0), (1.0, 2.0)]


def test_no_cut_holds_everything():
    window = window_of([3.0, 3.0], Measure())
    assert not window.cuts
    assert window.holds(-1.0)
    assert window.holds(1e9)


def test_a_cut_too_small_for_one_request_cuts_nothing():
    window = window_of([0.0, 1.0, 2.0], Measure(0.1, 0.1))
    assert not window.cuts
    assert window.holds(0.0)


def test_requests_that_arrive_at_once_cannot_be_cut_at_their_end():
    with pytest.raises(ConfigError, match=r"0 where requests arrive at once, got 0\.5"):
        window_of([0.0] * 4, Measure(0.0, 0.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warm_up": 1.0}, r"measure.warm_up must be in \[0, 1\), got 1.0"),
        ({"drain": -0.1}, r"measure.drain must be in \[0, 1\), got -0.1"),
        ({"warm_up": 0.5, "drain": 0.5}, r"measure.warm_up \+ measure.drain must be < 1, got 1.0"),
    ],
)
def test_bad_cut_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Measure(**values)


@pytest.mark.parametrize(
    ("slo", "one", "kept"),
    [
        (Slo(ttft_s=1.0), record([1.0, 9.0]), True),
        (Slo(ttft_s=0.9), record([1.0, 9.0]), False),
        (Slo(tpot_s=4.0), record([1.0, 9.0]), False),
        (Slo(tpot_s=4.0), record([1.0, 2.0, 9.0]), True),
        (Slo(tpot_s=0.1), record([1.0]), True),
        (Slo(itl_s=7.0), record([1.0, 2.0, 9.0]), True),
        (Slo(itl_s=6.9), record([1.0, 2.0, 9.0]), False),
        (Slo(ttft_s=9.0), record([1.0], reason="abort"), False),
    ],
)
def test_a_request_keeps_its_slo_or_not(slo, one, kept):
    assert slo.kept(one) is kept


def test_slo_has_no_limits_by_default_and_refuses_bad_ones():
    assert not Slo().given
    assert Slo(itl_s=1.0).given
    with pytest.raises(ConfigError, match=r"slo.ttft_s must be > 0 or null, got 0"):
        Slo(ttft_s=0)
    with pytest.raises(ConfigError, match=r"slo.attainment must be in \(0, 1\], got 90"):
        Slo(attainment=90)


def test_tokens_are_counted_by_their_time_over_all_choices():
    assert tokens_within(record([1.0, 2.0, 3.0, 4.0], choices=2), 2.0, 3.0) == 4
    assert tokens_within(record([]), 0.0, 9.0) == 0
