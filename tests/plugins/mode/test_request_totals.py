"""plugins/mode/request_totals.py: sums that do not depend on the order in which requests end."""

from itertools import permutations

import pytest

from core.records import RequestRecord
from plugins.mode.request_totals import totals_of


def ended(arrival_s: float, finished_s: float) -> RequestRecord:
    record = RequestRecord(f"at {arrival_s}", "", arrival_s, 3)
    record.finished_s, record.finish_reason = finished_s, "length"
    return record


@pytest.mark.parametrize("order", [*permutations([(0.0, 9.0), (5.0, 6.0), (7.0, 8.0)])])
def test_run_lasts_from_the_first_arrival_at_zero_to_the_last_end(
    order: tuple[tuple[float, float], ...],
) -> None:
    totals = totals_of(ended(*times) for times in order)
    assert (totals.first_arrival_s, totals.last_end_s) == (0.0, 9.0)


def test_times_before_zero_count_too() -> None:
    totals = totals_of([ended(-3.0, 0.0), ended(-2.0, -1.0)])
    assert (totals.first_arrival_s, totals.last_end_s) == (-3.0, 0.0)
