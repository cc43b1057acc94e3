"""priority_ageing: each level of priority is worth a time of waiting, and no more."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import Hold
from plugins.order.priority_ageing import PriorityAgeing
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def test_keys_are_arrival_moved_by_priority_and_never_change():
    view = table_of(arrival_s=[5.0, 0.0, 7.0], priority=[0, 2, -1])
    decision = PriorityAgeing(level_s=3.0).decide_order(order_query(view))
    assert np.asarray(decision.keys).tolist() == [5.0, 6.0, 4.0]
    assert decision.hold is Hold.ALWAYS


@pytest.mark.parametrize("level_s", [-1.0, float("inf"), float("nan")])
def test_level_out_of_range_is_refused(level_s):
    with pytest.raises(ConfigError, match="level_s must be >= 0 and finite, got "):
        PriorityAgeing(level_s)


def test_a_request_waits_for_no_more_urgent_one_that_came_later_than_the_bound():
    """One slot and a stream of urgent requests that would starve the other for ever."""
    stream = [
        Arrival(3 * i, f"u{i}", 8, 4, fields={"priority": 0, "arrival_s": 0.3 * i})
        for i in range(30)
    ]
    patient = Arrival(1, "low", 8, 4, fields={"priority": 2, "arrival_s": 0.1})
    engine = make_engine(seqs=1, plugins={"mine": PriorityAgeing(level_s=1.25)})
    out = run(engine, [*stream, patient])
    bound_s = 0.1 + (2 - 0) * 1.25
    before = [a.name for a in stream if a.fields["arrival_s"] <= bound_s]
    started = sorted(out.records, key=out.first_token_step)
    assert started[: len(before) + 1] == [*before, "low"]
