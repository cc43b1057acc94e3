"""vtc: the client that was served least goes first, and the gap between two stays bounded."""

from collections import Counter

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import Hold, StepEvent
from core.records import Choice, RequestRecord, StepRecord
from core.request import Request
from plugins.order.fcfs import Fcfs
from plugins.order.vtc import Vtc
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query

SHORT = {"A": (20, 30), "B": (60, 8)}  # client -> prompt and output tokens


class Queue:
    """A queue by hand: requests r0, r1, ... of given clients and prompt lengths."""

    def __init__(self, policy, clients, prompts, **columns):
        self.policy = policy
        self.asked = [
            Request(f"r{i}", np.ones(tokens, np.int32), client=client)
            for i, (client, tokens) in enumerate(zip(clients, prompts, strict=True))
        ]
        labels = [sorted(set(clients)).index(client) for client in clients]
        self.view = table_of(prompt=list(prompts), client=labels, **columns)

    def keys(self, step, rows, cached=None):
        view = self.view._table.view(self.view._slots[rows])
        asked = [self.asked[row] for row in rows]
        query = order_query(view, step=step, requests=asked, cached=cached)
        decision = self.policy.decide_order(query)
        assert decision.hold is Hold.STEP
        return np.asarray(decision.keys).tolist()

    def step(self, step, admitted=(), tokens=(), finished=(), cached=0, steps=1):
        names = [f"r{row}" for row in admitted]
        detail = {"cached_tokens": cached}
        choices = [Choice(one, 0, "admitted", "gate", "", detail) for one in names]
        ended = tuple(RequestRecord(f"r{row}", "", 0.0, 1) for row in finished)
        rows = [(self.asked[row].request_id, 0) for row in tokens]
        record = StepRecord(step, 0.0, choices=choices, steps=steps)
        self.policy.on_step(StepEvent(record, rows, np.empty(0, np.int32), ended))


def test_keys_are_the_counters_at_each_request_s_turn():
    queue = Queue(Vtc(), "AABAB", [10, 20, 30, 5, 40])
    assert queue.keys(0, [0, 1, 2, 3, 4]) == [0.0, 10.0, 0.0, 30.0, 30.0]


def test_a_request_that_left_is_charged_at_once_and_only_once():
    queue = Queue(Vtc(), "AAB", [10, 20, 30])
    queue.keys(0, [0, 1, 2])
    assert queue.keys(1, [1, 2]) == [10.0, 0.0]  # r0 is presumed to have started
    queue.step(0, admitted=[0])
    assert queue.keys(2, [1, 2]) == [10.0, 0.0]  # and now it is on record


def test_a_request_that_left_without_a_start_is_not_charged():
    queue = Queue(Vtc(), "AAB", [10, 20, 30])
    queue.keys(0, [0, 1, 2])
    queue.step(0)
    queue.keys(1, [1, 2])
    assert queue.keys(2, [1, 2]) == [0.0, 0.0]


def test_output_tokens_are_charged_two_each_two_steps_later():
    queue = Queue(Vtc(), "AAB", [10, 20, 30])
    queue.keys(0, [0, 1, 2])
    queue.step(0, admitted=[0], tokens=[0])
    queue.step(1, tokens=[0])
    assert queue.keys(2, [1, 2]) == [12.0, 0.0]
    queue.step(2, tokens=[0], finished=[0])
    assert queue.keys(3, [1, 2]) == [14.0, 0.0]
    assert queue.keys(4, [1, 2]) == [16.0, 0.0]


def test_steps_that_went_in_one_are_charged_as_if_they_had_gone_apart():
    queue = Queue(Vtc(), "AAB", [10, 20, 30])
    queue.keys(0, [0, 1, 2])
    queue.step(0, admitted=[0], tokens=[0])
    queue.step(1, tokens=[0], steps=5)
    assert queue.keys(6, [1, 2]) == [10.0 + 2 * 5, 0.0]
    assert queue.keys(7, [1, 2]) == [10.0 + 2 * 6, 0.0]


def test_a_preempted_request_is_charged_for_its_prompt_once_and_goes_before_its_client_s_others():
    queue = Queue(Vtc(), "AAB", [10, 20, 30])
    queue.keys(0, [0, 1, 2])
    queue.step(0, admitted=[1])
    queue.keys(2, [0, 2])
    queue.view._table.preemptions[queue.view._slots[1]] = 1
    assert queue.keys(3, [0, 1, 2]) == [20.0, 20.0, 0.0]
    queue.step(3, admitted=[1])
    assert queue.keys(5, [0, 2]) == [20.0, 0.0]


def test_charges_are_divided_by_the_client_s_weight():
    queue = Queue(Vtc(client_weights={"A": 4.0}), "AAB", [40, 20, 30])
    assert queue.keys(0, [0, 1, 2]) == [0.0, 10.0, 0.0]
    queue.step(0, admitted=[0], tokens=[0, 0])
    assert queue.keys(2, [1, 2]) == [11.0, 0.0]


def test_a_client_that_comes_back_is_lifted_to_the_least_of_those_in_the_queue():
    queue = Queue(Vtc(), "AABCC", [100, 10, 30, 5, 5])
    queue.keys(0, [0, 1])
    queue.step(0, admitted=[0])
    queue.keys(1, [1])
    # A stands at 100; B comes new and is lifted to it, so that its idle time is no credit.
    assert queue.keys(2, [1, 2]) == [100.0, 100.0]
    queue.step(2, admitted=[2])
    queue.keys(3, [1])
    # B stands at 130 and has left; C comes and is lifted to A, the only one there.
    assert queue.keys(4, [1, 3, 4]) == [100.0, 100.0, 105.0]


def test_with_an_empty_queue_a_client_is_lifted_to_the_one_that_left_last():
    queue = Queue(Vtc(), "ABC", [100, 60, 30])
    queue.keys(0, [0, 1])
    queue.step(0, admitted=[0])
    queue.keys(1, [1])
    queue.step(1, admitted=[1])
    assert queue.keys(9, [2]) == [60.0]  # B left last, at 60


def test_fork_s_prompt_is_the_request_s_and_not_charged_again():
    arrivals = [Arrival(0, "A", 20, 6, None, {"n": 3}), Arrival(0, "B", 20, 6)]
    policy = Vtc()
    run(make_engine(seqs=1, plugins={"mine": policy}), arrivals)
    policy._accounts._book(10**9)
    assert policy._accounts.of("") == 20 + 20 + 2 * 4 * 6
    assert not policy._accounts._tabs


def gaps(policy):
    """Service of A less that of B after every step in which both have requests waiting."""
    arrivals = [
        Arrival(start, f"{client}{i}", *SHORT[client], fields={"client": client})
        for client, start in (("A", 0), ("B", 10))
        for i in range(24)
    ]
    out = run(make_engine(pages=16, seqs=6, plugins={"mine": policy}), arrivals)
    service, started, differences = Counter(), Counter(), []
    for event in out.events:
        for choice in event.record.choices:
            if choice.kind == "admitted":
                client = choice.request_id[0]
                service[client] += SHORT[client][0]
                started[client] += 1
        for name, _ in event.rows:
            service[name[0]] += 2
        if event.record.step >= 10 and max(started.values()) < 24:
            differences.append(service["A"] - service["B"])
    return differences


def test_service_of_two_backlogged_clients_differs_by_less_than_the_bound():
    """2 * max(w_p * longest prompt, w_q * M): here M = 16 pages of 16 tokens."""
    bound = 2 * max(1 * 60, 2 * 256)
    fair, unfair = gaps(Vtc()), gaps(Fcfs())
    assert len(fair) > 50
    assert max(fair) - min(fair) <= bound
    assert max(unfair) - min(unfair) > bound


def test_weighted_clients_get_service_in_proportion():
    weights = {"A": 3.0, "B": 1.0}
    arrivals = [
        Arrival(0, f"{client}{i}", 20, 10, fields={"client": client})
        for i in range(20)
        for client in "AB"
    ]
    engine = make_engine(seqs=4, plugins={"mine": Vtc(client_weights=weights)})
    out = run(engine, arrivals)
    first = [c.request_id[0] for c in out.choices("admitted")][:20]
    assert 14 <= first.count("A") <= 16


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt_weight", -1.0), ("output_weight", 0.0), ("client_weights", {"A": 0.0})],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}.* must be "):
        Vtc(**{field: value})


def test_steps_do_not_pile_up_while_nobody_waits():
    policy = Vtc()
    queue = Queue(policy, "A", [10])
    queue.keys(0, [0])
    for step in range(50):
        queue.step(step, tokens=[0])
    assert len(policy._accounts._steps.due(10**9)) == 1
