"""The waiting queue: its order, and when it asks for keys again."""

import numpy as np
import pytest

from core.queries import Hold, OrderDecision
from core.records import ChoiceRecord
from core.request import Request
from core.table import SequenceTable
from core.waiting import WaitingQueue


class Bench:
    """A queue with a policy that keys by `keys[id]` and notes whom it was asked about."""

    def __init__(self, hold=Hold.ALWAYS):
        self.table = SequenceTable(max_model_len=64)
        self.queue = WaitingQueue(self.table)
        self.keys = {}
        self.hold = hold
        self.asked = []

    def add(self, key, push=True, preemptions=0):
        request = Request(f"r{len(self.keys)}", np.ones(3, np.int32))
        sequence = self.table.add(request, 0, ChoiceRecord(), 1.0)
        self.table.preemptions[sequence.slot] = preemptions
        self.keys[sequence.id] = key
        if push:
            self.queue.push(sequence.id)
        return sequence.id

    def decide(self, query):
        self.asked.append(query.waiting.id.tolist())
        keys = np.array([self.keys[one] for one in self.asked[-1]], float)
        return OrderDecision(keys, self.hold), "policy"

    def refresh(self, now_s=0.0, step=0):
        self.asked.clear()
        self.queue.refresh(self.decide, (lambda ids: None, lambda one: None), now_s, step)
        return [self.queue.at(index) for index in range(len(self.queue))]


def test_smallest_key_first_then_submission_order():
    bench = Bench()
    ids = [bench.add(key) for key in (3.0, 1.0, 2.0, 1.0)]
    assert bench.refresh() == [ids[1], ids[3], ids[2], ids[0]]


def test_later_columns_break_ties():
    bench = Bench()
    ids = [bench.add(key) for key in [(1.0, 5.0), (1.0, 2.0), (0.0, 9.0)]]
    assert bench.refresh() == [ids[2], ids[1], ids[0]]


def test_preempted_go_first_among_equals_only():
    bench = Bench()
    fresh, more_urgent = bench.add(1.0), bench.add(0.0)
    preempted = bench.add(1.0, preemptions=1)
    assert bench.refresh() == [more_urgent, preempted, fresh]


def test_keys_that_hold_are_asked_for_once():
    bench = Bench()
    first = bench.add(1.0)
    bench.refresh()
    assert bench.asked == [[first]]
    bench.refresh(now_s=100.0, step=50)
    assert bench.asked == []
    second = bench.add(0.0)
    assert bench.refresh() == [second, first]
    assert bench.asked == [[second]], "only who is new"


def test_keys_for_a_step_are_asked_for_in_the_next():
    bench = Bench(Hold.STEP)
    a, b = bench.add(1.0), bench.add(2.0)
    assert bench.refresh(step=0) == [a, b]
    bench.keys[b] = 0.0
    assert bench.refresh(step=1) == [b, a]
    assert bench.asked == [[a, b]]


def test_keys_for_a_step_of_some_leave_the_others_alone():
    bench = Bench()
    steady = bench.add(1.0)
    bench.refresh()
    bench.hold = Hold.STEP
    drifting = bench.add(2.0)
    assert bench.refresh(step=1) == [steady, drifting]
    bench.keys[drifting] = 0.0
    assert bench.refresh(step=2) == [drifting, steady]
    assert bench.asked == [[drifting]]


def test_one_that_left_does_not_make_the_steady_ask_again():
    bench = Bench()
    bench.add(1.0)
    bench.refresh()
    bench.hold = Hold.STEP
    drifting = bench.add(2.0)
    bench.refresh(step=1)
    bench.queue.discard(drifting)
    bench.refresh(step=2)
    assert bench.asked == []


def test_keys_until_a_time_are_asked_for_at_that_time():
    bench = Bench(hold=5.0)
    a, b = bench.add(1.0), bench.add(2.0)
    bench.refresh(now_s=0.0)
    bench.keys[a], bench.hold = 3.0, 9.0
    assert bench.refresh(now_s=4.9) == [a, b]
    assert bench.asked == []
    assert bench.refresh(now_s=5.0) == [b, a]
    assert sorted(bench.asked[0]) == [a, b]
    bench.refresh(now_s=8.9)
    assert bench.asked == []


def test_touch_asks_again_and_moves():
    bench = Bench()
    a, b = bench.add(1.0), bench.add(2.0)
    bench.refresh()
    bench.keys[b] = 0.0
    bench.queue.touch(b)
    assert len(bench.queue) == 2
    assert bench.refresh() == [b, a]
    assert bench.asked == [[b]]


def test_touch_of_one_that_does_not_wait_does_nothing():
    bench = Bench()
    absent = bench.add(1.0, push=False)
    bench.queue.touch(absent)
    assert absent not in bench.queue
    assert bench.refresh() == []
    assert bench.asked == []


@pytest.mark.parametrize("hold", [Hold.ALWAYS, Hold.STEP, 5.0])
@pytest.mark.parametrize("keyed", [False, True])
def test_discard_takes_out_and_forgets_the_hold(keyed, hold):
    bench = Bench(hold)
    a, b = bench.add(1.0), bench.add(2.0)
    if keyed:
        bench.refresh()
    bench.queue.discard(a)
    bench.queue.discard(a)
    assert a not in bench.queue
    assert b in bench.queue
    assert len(bench.queue) == 1
    assert bench.refresh(now_s=10.0, step=1) == [b]
    assert all(a not in asked for asked in bench.asked)


def test_one_that_comes_back_gets_a_new_key():
    bench = Bench()
    a, b = bench.add(1.0), bench.add(2.0)
    bench.refresh()
    bench.queue.discard(a)
    bench.keys[a] = 3.0
    bench.queue.push(a)
    assert bench.refresh() == [b, a]


@pytest.mark.parametrize("hold", [Hold.ALWAYS, Hold.STEP, 3.0])
def test_random_traffic_stays_sorted(hold):
    rng = np.random.default_rng(1)
    bench = Bench(hold)
    waiting = []
    for step in range(300):
        for _ in range(rng.integers(0, 4)):
            waiting.append(bench.add(float(rng.integers(0, 10)), preemptions=rng.integers(0, 2)))
        for _ in range(rng.integers(0, 3)):
            if waiting:
                gone = waiting.pop(rng.integers(len(waiting)))
                bench.queue.discard(gone)
        if waiting and rng.random() < 0.3:
            changed = waiting[rng.integers(len(waiting))]
            bench.keys[changed] = float(rng.integers(0, 10))
            bench.queue.touch(changed)
        bench.hold = hold if not isinstance(hold, float) else step + hold
        table = bench.table
        slot_mask = (1 << 20) - 1
        expected = sorted(
            waiting,
            key=lambda one: (
                bench.keys[one],
                not table.preemptions[one & slot_mask],
                table.arrival_order[one & slot_mask],
            ),
        )
        assert bench.refresh(now_s=float(step), step=step) == expected
