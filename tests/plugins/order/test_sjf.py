"""Shortest first, by the whole predicted output (sjf) or by what is left of it (srtf)."""

import numpy as np
import pytest

from core.queries import Hold
from plugins.order.sjf import Sjf
from plugins.order.srtf import Srtf
from plugins.predictor.oracle import Oracle
from tests.core.policy_tables import table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def keys(policy, **columns):
    decision = policy.decide_order(order_query(table_of(**columns)))
    assert decision.hold is Hold.ALWAYS
    assert decision.reason
    return np.asarray(decision.keys).tolist()


def test_sjf_keys_are_the_predicted_output_then_arrival():
    columns = {"predicted_output": [30.0, 5.0, 30.0], "arrival_s": [2.0, 9.0, 1.0]}
    assert keys(Sjf(), **columns, max_output=[50] * 3) == [[30.0, 2.0], [5.0, 9.0], [30.0, 1.0]]


def test_sjf_expects_no_more_than_the_limit():
    assert keys(Sjf(), predicted_output=[30.0], max_output=[12]) == [[12.0, 0.0]]


def test_sjf_counts_the_whole_output_of_a_preempted_request_and_srtf_the_rest():
    columns = {"predicted_output": [30.0], "max_output": [50], "prompt": [10], "known": [35]}
    assert keys(Sjf(), **columns) == [[30.0, 0.0]]
    assert keys(Srtf(), **columns) == [[5.0, 0.0]]


def test_srtf_counts_a_token_in_flight_as_emitted():
    columns = {"predicted_output": [30.0] * 2, "max_output": [50] * 2, "prompt": [10] * 2}
    assert keys(Srtf(), **columns, known=[13, 14], in_flight=[1, 0]) == [[26.0, 0.0]] * 2


def test_srtf_expects_at_least_one_token_of_a_request_that_outlived_its_prediction():
    columns = {"predicted_output": [5.0], "max_output": [50], "prompt": [10], "known": [25]}
    assert keys(Srtf(), **columns) == [[1.0, 0.0]]


@pytest.mark.parametrize("policy", [Sjf(), Srtf()], ids=lambda policy: type(policy).__name__)
def test_shortest_ends_first_with_true_lengths(policy):
    lengths = {"A": 20, "B": 3, "C": 11, "D": 7}
    arrivals = [
        Arrival(0, name, 8, 40, fields={"forced_output": length})
        for name, length in lengths.items()
    ]
    engine = make_engine(seqs=1, predictor=Oracle(), plugins={"mine": policy})
    out = run(engine, arrivals)
    assert sorted(lengths, key=out.first_token_step) == ["B", "D", "C", "A"]


def test_true_lengths_are_hidden_without_the_oracle():
    """Equal limits, so equal predictions: the order of submission is left."""
    lengths = {"A": 20, "B": 3, "C": 11}
    arrivals = [
        Arrival(0, name, 8, 40, fields={"forced_output": length})
        for name, length in lengths.items()
    ]
    out = run(make_engine(seqs=1, plugins={"mine": Sjf()}), arrivals)
    assert sorted(lengths, key=out.first_token_step) == ["A", "B", "C"]
