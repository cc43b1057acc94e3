"""slack: who must start soonest goes first, unless it must miss its deadline anyway."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import Hold
from plugins.order.slack import Slack
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query

INF = float("inf")


def decide(policy, now_s=0.0, **columns):
    return policy.decide_order(order_query(table_of(**columns), now_s=now_s))


def order(decision):
    keys = np.asarray(decision.keys)
    return np.lexsort(keys.T[::-1]).tolist()


def test_latest_start_is_the_deadline_less_the_predicted_time():
    policy = Slack(prompt_token_s=0.01, output_token_s=0.1)
    decision = decide(
        policy,
        prompt=[100, 100],
        predicted_output=[20.0, 50.0],
        max_output=[60, 60],
        deadline_s=[9.0, 9.5],
    )
    assert np.allclose(decision.keys, [[0, 9.0 - 1.0 - 2.0], [0, 9.5 - 1.0 - 5.0]])
    assert order(decision) == [1, 0]


def test_without_times_it_is_earliest_deadline_first():
    assert order(decide(Slack(), deadline_s=[9.0, 7.0, 8.0])) == [1, 2, 0]


def test_those_that_must_miss_come_after_those_that_can_keep_and_dateless_ones_last():
    decision = decide(
        Slack(), now_s=5.0, deadline_s=[INF, 4.0, 6.0, INF, 3.0], arrival_s=[2.0, 0, 0, 1.0, 0]
    )
    assert order(decision) == [2, 4, 1, 3, 0]


def test_keys_hold_until_the_first_must_miss():
    assert decide(Slack(), now_s=5.0, deadline_s=[9.0, 4.0, 6.0, INF]).hold == 6.0
    assert decide(Slack(), now_s=5.0, deadline_s=[4.0, INF]).hold is Hold.ALWAYS


def test_a_request_that_has_missed_its_deadline_while_waiting_gives_way():
    """One slot, steps of 0.01 s. X runs first, for some 0.3 s; then B can still be in time."""
    names = {"X": 0.01, "A": 0.15, "B": 5.0}
    arrivals = [
        Arrival(0, name, 8, 30 if name == "X" else 4, fields={"deadline_s": deadline})
        for name, deadline in names.items()
    ]
    out = run(make_engine(seqs=1, plugins={"mine": Slack()}), arrivals)
    assert sorted(names, key=out.first_token_step) == ["X", "B", "A"]


@pytest.mark.parametrize("field", ["prompt_token_s", "output_token_s"])
def test_times_out_of_range_are_refused(field):
    for value in (-0.1, INF):
        with pytest.raises(ConfigError, match=f"{field} must be >= 0 and finite, got "):
            Slack(**{field: value})
