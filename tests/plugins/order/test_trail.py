"""trail: shortest remaining first, and the young give way to those with less left."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import Cause
from plugins.order.trail import Trail
from plugins.predictor.oracle import Oracle
from tests.core.policy_tables import preemption_query, rows_of, table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def running(emitted, predicted):
    """Rows of 10 prompt tokens; in the order of admission."""
    return table_of(
        prompt=[10] * len(emitted),
        known=[10 + num for num in emitted],
        max_output=[1000] * len(emitted),
        predicted_output=[float(num) for num in predicted],
    )


def victims(policy, view, cause=Cause.DISPLACE, predicted=None):
    beneficiary = None if predicted is None else running([0], [predicted])
    query = preemption_query(view, cause=cause, beneficiary=beneficiary)
    return rows_of(view, policy.decide_preemption(query).victims)


def test_keys_are_the_predicted_remaining_output():
    query = order_query(running([0, 25, 3], [40, 40, 10]))
    assert np.asarray(Trail().decide_order(query).keys)[:, 0].tolist() == [40.0, 15.0, 7.0]


@pytest.mark.parametrize("cause", [Cause.SLOTS, Cause.DISPLACE])
def test_only_the_young_with_more_left_give_way_most_left_first(cause):
    # Left: 90, 30, 10, 19; young below 80 tokens of 100, 32 of 40, 16 of 20, 80 of 100.
    view = running([10, 10, 10, 81], [100, 40, 20, 100])
    assert victims(Trail(0.8), view, cause, predicted=10) == [0, 1]
    assert victims(Trail(0.8), view, cause, predicted=9) == [0, 1, 2]
    assert victims(Trail(0.8), view, cause, predicted=90) == []


def test_a_request_is_young_strictly_below_the_share():
    view = running([79, 80], [100, 100])
    assert victims(Trail(0.8), view, predicted=1) == [0]
    assert victims(Trail(1.0), view, predicted=1) == [0, 1]
    assert victims(Trail(0.0), view, predicted=1) == []


def test_for_pages_everyone_is_ranked_the_young_first():
    view = running([95, 10, 90, 0], [100, 20, 100, 30])
    assert victims(Trail(0.8), view, Cause.PAGES) == [3, 1, 2, 0]


def scenario():
    lengths = {"long": 40, "short": 4}
    return [
        Arrival(step, name, 8, 60, fields={"forced_output": lengths[name]})
        for step, name in ((0, "long"), (6, "short"))
    ]


@pytest.mark.parametrize(("share", "displaced"), [(0.8, True), (0.1, False)])
def test_a_short_request_displaces_a_young_long_one(share, displaced):
    engine = make_engine(seqs=1, predictor=Oracle(), plugins={"mine": Trail(share)})
    out = run(engine, scenario())
    assert [c.request_id for c in out.choices("preempted")] == (["long"] if displaced else [])
    assert (out.last_token_step("short") < out.last_token_step("long")) == displaced


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match=r"preemptible_share must be in \[0, 1\], got "):
        Trail(share)
