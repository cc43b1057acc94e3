"""dlpm: longest prefix first among clients that have an allowance left."""

from collections import Counter

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.order.dlpm import Dlpm
from plugins.order.longest_prefix import LongestPrefix
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.test_vtc import Queue


def queue(policy):
    """Clients A (r0 .. r3) and B (r4, r5), 60 prompt tokens each."""
    return Queue(policy, "AAAABB", [60] * 6)


CACHED = [40, 40, 40, 40, 0, 0]  # so A's are charged 20 each, B's 60


def test_keys_are_refills_before_the_turn_then_cached_tokens():
    keys = queue(Dlpm(quantum=50.0)).keys(0, range(6), CACHED)
    # A starts three at 50, 30 and 10, the fourth at -10; B one at 50, the second at -10.
    assert keys == [[0, -40], [0, -40], [0, -40], [1, -40], [0, 0], [1, 0]]


def test_a_refill_comes_when_nobody_has_an_allowance_left():
    policy = Dlpm(quantum=50.0)
    line = queue(policy)
    line.keys(0, range(6), CACHED)
    line.step(0, admitted=[0, 1, 2], cached=40)
    line.keys(1, [3, 4, 5], [40, 0, 0])
    line.keys(2, [3, 4, 5], [40, 0, 0])
    assert [policy.allowance(client) for client in "AB"] == [-10.0, 50.0]
    line.step(2, admitted=[4])
    line.keys(3, [3, 5], [40, 0])
    assert [policy.allowance(client) for client in "AB"] == [-10.0, -10.0]  # B's is presumed
    # Both are in debt. A's next starts on a refill, which B gets as well.
    line.step(3, admitted=[3], cached=40)
    line.keys(4, [5], [0])
    assert [policy.allowance(client) for client in "AB"] == [20.0, 40.0]


def test_a_large_quantum_is_longest_prefix_first():
    keys = queue(Dlpm(quantum=1e6)).keys(0, range(6), CACHED)
    assert keys == [[0, -40]] * 4 + [[0, 0]] * 2


def test_a_client_that_is_away_works_off_its_debt_and_saves_no_more_than_a_quantum():
    policy = Dlpm(quantum=50.0)
    policy._granted = {"debtor": -70.0, "idle": 45.0, "here": 0.0}
    policy._clients, policy._ids, policy._refills = {"here"}, np.array([1]), np.array([2.0])
    policy._refill(np.array([1]))
    assert policy._granted == {"debtor": 30.0, "idle": 50.0, "here": 100.0}


def test_aborts_bring_no_more_refills_than_those_who_stay_wait_for():
    policy = Dlpm(quantum=50.0)
    policy._granted = {"here": 0.0}
    policy._clients, policy._ids = {"here"}, np.array([1, 2])
    policy._refills = np.array([9.0, 1.0])
    policy._refill(np.array([1]))
    assert policy._granted == {"here": 50.0}


def test_a_client_without_a_cached_prefix_gets_its_share():
    """A's requests share a prefix and would all go first under longest prefix first."""
    shares = {"A": ("A", 48), "B": None}
    arrivals = [Arrival(0, "A", 64, 2, fields={"client": "A"})] + [
        Arrival(2, f"{client}{i}", 64, 8, shares[client], fields={"client": client})
        for client in "AB"
        for i in range(16)
    ]

    def early(policy):
        out = run(make_engine(pages=32, seqs=2, plugins={"mine": policy}), arrivals)
        return Counter(c.request_id[0] for c in out.choices("admitted")[:17])["B"]

    assert early(LongestPrefix()) == 0
    assert early(Dlpm(quantum=1e6)) == 0
    assert early(Dlpm(quantum=64.0)) >= 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("quantum", 0.0), ("prompt_weight", -1.0), ("output_weight", 0.0), ("window", 0)],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be "):
        Dlpm(**{field: value})


def test_prompt_of_a_late_record_is_charged_as_it_was_cached_then():
    policy = Dlpm(quantum=1000.0)
    line = queue(policy)
    line.keys(0, [0, 4], [0, 0])
    line.step(0, admitted=[0], cached=16)
    line.keys(2, [4], [0])
    assert policy.allowance("A") == 1000.0 - (60 - 16)
    assert np.isfinite(policy.allowance("B"))
