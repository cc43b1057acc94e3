"""mc_sf: its arithmetic, and that true lengths leave nobody to preempt."""

import numpy as np
import pytest

from core.queries import Verdict
from plugins.admission.mc_sf import McSf
from plugins.admission.reserve_max import ReserveMax
from plugins.cache.none import NoCache
from plugins.order.sjf import Sjf
from plugins.predictor.oracle import Oracle
from tests.core.policy_tables import admission_query, table_of
from tests.engine_harness import Arrival, make_engine, run


def decide(running, **facts):
    return McSf().decide_admission(admission_query(running, **facts))


def test_peak_of_predicted_lengths_must_be_within_the_supply():
    # It has 20 tokens and 6 to come, the candidate 10 and 8: when the first ends 25 and 15 are
    # stored, two pages and one; the candidate ends alone with 17, two pages.
    running = table_of(prompt=[10], known=[20], predicted_output=[16.0], pages_held=[2])
    assert decide(running, pages_free=1).verdict is Verdict.ADMIT
    refused = decide(running, pages_free=0)
    assert refused.verdict is Verdict.WAIT
    assert refused.reason == "peak of 3 pages as predicted, 2 to use"


def test_part_of_a_predicted_token_counts_as_one():
    running = table_of(prompt=[10], predicted_output=[5.2], max_output=[50], pages_held=[10])
    query = {"page_size": 1, "candidate": table_of(prompt=[3], predicted_output=[5.2])}
    assert decide(running, **query).reason == "peak of 23 pages as predicted, 10 to use"


def test_request_alone_is_admitted():
    assert decide(table_of(0), pages_needed=99).verdict is Verdict.ADMIT


@pytest.mark.parametrize("possible", [True, False])
def test_reservation_at_once_asks_the_allocator(possible):
    query = admission_query(
        table_of(1), allocatable=lambda num_pages: possible, pages_reserved_at_once=7
    )
    verdict = McSf().decide_admission(query).verdict
    assert verdict is (Verdict.ADMIT if possible else Verdict.WAIT)


def play(plugins, seed):
    rng = np.random.default_rng(seed)
    arrivals = [
        Arrival(
            int(rng.integers(0, 30)),
            f"r{i}",
            int(rng.integers(1, 60)),
            100,
            params={"ignore_eos": False},
            fields={"forced_output": int(rng.integers(1, 60))},
        )
        for i in range(16)
    ]
    engine = make_engine(pages=12, seqs=24, budget=4096, cache=NoCache(), plugins=plugins)
    return run(engine, arrivals)


@pytest.mark.parametrize("seed", range(2))
def test_nobody_is_preempted_with_true_lengths_and_more_run_than_by_reservation(seed):
    true = play({"gate": McSf(), "sjf": Sjf(), "oracle": Oracle()}, seed)
    assert true.preemptions() == 0
    assert true.choices("refused"), "it was short of memory"
    reserved = play({"gate": ReserveMax()}, seed)
    assert len(true.events) < len(reserved.events)
    assert max(e.record.running for e in true.events) > max(
        e.record.running for e in reserved.events
    )
