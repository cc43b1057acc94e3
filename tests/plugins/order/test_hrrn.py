"""hrrn: prompt tokens computed while it waited, over those it needs itself."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import StepEvent
from core.records import StepRecord
from plugins.order.hrrn import Hrrn
from plugins.order.lagged import Lagged
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def computed(policy, step, prefill_tokens):
    record = StepRecord(step, 0.0, prefill_tokens=prefill_tokens)
    policy.on_step(StepEvent(record, [], np.empty(0, np.int32)))


def test_facts_are_given_out_two_steps_later_and_once():
    lagged = Lagged()
    for step in range(3):
        lagged.add(step, f"step {step}")
    assert lagged.due(1) == []
    assert lagged.due(3) == ["step 0", "step 1"]
    assert lagged.due(3) == []
    assert lagged.due(9) == ["step 2"]


def test_ratio_is_what_was_computed_while_waiting_over_the_work_not_cached():
    policy = Hrrn()
    view = table_of(prompt=[50, 400], arrival_s=[1.0, 0.0])
    first = view._table.view(view._slots[:1])
    policy.decide_order(order_query(first, step=0, cached=[0]))
    computed(policy, 0, 100)
    policy.decide_order(order_query(view, step=2, cached=[0, 0]))
    computed(policy, 2, 200)
    keys = policy.decide_order(order_query(view, step=4, cached=[30, 0])).keys
    assert np.asarray(keys).tolist() == [[-300 / 20, 1.0], [-200 / 400, 0.0]]


def test_a_long_request_that_waited_passes_short_ones_that_came_later():
    """One slot, and always short prompts that wait too: the shortest first would keep the long one
    to the end."""
    steps = [0, 0, 0, *range(2, 80, 2)]
    stream = [Arrival(step, f"s{i}", 20, 2) for i, step in enumerate(steps)]
    long = Arrival(1, "long", 120, 2)
    engine = make_engine(seqs=1, budget=32, plugins={"mine": Hrrn()})
    out = run(engine, [*stream, long])
    started = sorted(out.records, key=out.first_token_step)
    assert 10 < started.index("long") < 25


def test_window_below_one_is_refused():
    with pytest.raises(ConfigError, match="window must be >= 1, got 0"):
        Hrrn(window=0)
