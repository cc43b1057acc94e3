"""Orders of the waiting queue."""

import numpy as np

from core.queries import Hold
from plugins.order.fcfs import Fcfs
from plugins.order.priority import Priority
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def keys(policy, **columns):
    decision = policy.decide_order(order_query(table_of(**columns), now_s=9.0, step=1))
    assert decision.hold is Hold.ALWAYS
    assert decision.reason
    return np.asarray(decision.keys).tolist()


def test_fcfs_keys_are_arrival_times_and_nothing_else():
    columns = {"arrival_s": [2.0, 0.5, 2.0], "priority": [0, 9, 5], "preemptions": [0, 3, 1]}
    assert keys(Fcfs(), **columns) == [2.0, 0.5, 2.0]


def test_priority_keys_are_priority_then_arrival():
    columns = {"arrival_s": [2.0, 0.5, 1.0], "priority": [1, 9, -5]}
    assert keys(Priority(), **columns) == [[1.0, 2.0], [9.0, 0.5], [-5.0, 1.0]]


def test_fcfs_starts_requests_by_arrival_whatever_the_order_of_submission():
    engine = make_engine(seqs=1)
    arrivals = [Arrival(0, name, 8, 2) for name in "ABC"]
    times = {"A": 0.3, "B": 0.1, "C": 0.2}
    stamped = [Arrival(a.step, a.name, 8, 2, fields={"arrival_s": times[a.name]}) for a in arrivals]
    out = run(engine, stamped)
    assert sorted("ABC", key=out.first_token_step) == ["B", "C", "A"]


def test_fcfs_lets_a_preempted_request_keep_its_place():
    arrivals = [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40), Arrival(3, "C", 60, 4)]
    out = run(make_engine(pages=9), arrivals)
    assert [c.request_id for c in out.choices("preempted")][:1] == ["B"]
    started = [
        (choice.request_id, choice.kind)
        for event in out.events
        for choice in event.record.choices
        if choice.kind in ("admitted", "resumed")
    ]
    assert started.index(("B", "resumed")) < started.index(("C", "admitted"))
