"""plugins/mode/pending.py: whose turn it is."""

import numpy as np
import pytest

from core.request import Request
from plugins.mode.pending import Pending


def asked(name: str, arrival_s: float) -> Request:
    return Request(name, np.ones(1, np.int32), arrival_s=arrival_s)


def test_follow_ups_merge_by_time_after_the_workload_s_own_and_in_order() -> None:
    pending = Pending([asked("a", 0.0), asked("b", 2.0), asked("c", 5.0)])
    assert pending.next_s == 0.0
    for name, at in (("late", 9.0), ("tie", 2.0), ("tie again", 2.0), ("soon", 1.0)):
        pending.add(asked(name, at), ended_s=0.5)
    order = []
    while pending:
        at = pending.next_s
        request = pending.pop()
        assert request.arrival_s == at
        order.append(request.request_id)
    assert order == ["a", "soon", "b", "tie", "tie again", "c", "late"]
    assert pending.next_s == float("inf")
    with pytest.raises(IndexError):
        pending.pop()


def test_requests_are_taken_from_the_workload_one_at_a_time() -> None:
    taken = []

    def source():
        for number in range(3):
            taken.append(number)
            yield asked(str(number), float(number))

    pending = Pending(source())
    assert taken == [0]
    pending.pop()
    assert taken == [0, 1]


def test_follow_up_before_the_end_of_its_cause_is_refused() -> None:
    pending = Pending([])
    pending.add(asked("now", 3.0), ended_s=3.0)
    with pytest.raises(ValueError, match=r"arrival_s of follow-up 'early' must be >= 3.0, got 2.9"):
        pending.add(asked("early", 2.9), ended_s=3.0)
