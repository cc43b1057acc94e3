"""reserve_max: worst cases of all together, and no preemption ever."""

import numpy as np
import pytest

from core.queries import Verdict
from plugins.admission.reserve_max import ReserveMax
from plugins.allocator.contiguous import Contiguous
from plugins.batching.prefill_first import PrefillFirst
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from tests.core.policy_tables import admission_query, table_of
from tests.engine_harness import Arrival, make_engine, run


def verdict(running, allocatable=lambda num_pages: True, **facts):
    query = admission_query(running, allocatable, **facts)
    return ReserveMax().decide_admission(query).verdict


def test_worst_case_of_all_must_fit():
    # 10 + 38 tokens = 3 pages, 1 held; 10 + 22 = 2 pages, 2 held: two pages are spoken for.
    running = table_of(max_output=[38, 22], pages_held=[1, 2])
    supply = {"pages_free": 4, "pages_evictable": 3}
    assert verdict(running, pages_at_most=5, **supply) is Verdict.ADMIT
    assert verdict(running, pages_at_most=6, **supply) is Verdict.WAIT


def test_cached_prefix_counts_for_the_candidate_alone():
    """pages_at_most is beyond the prefix already; what the prompt needs now does not matter."""
    running = table_of(max_output=[6], pages_held=[1])
    assert verdict(running, pages_at_most=4, pages_needed=9, pages_free=4) is Verdict.ADMIT


def test_request_whose_worst_case_exceeds_the_pool_may_run_alone():
    assert verdict(table_of(0), pages_at_most=200, pages_free=100) is Verdict.ADMIT
    assert verdict(table_of(1), pages_at_most=200, pages_free=100) is Verdict.WAIT


def test_fragmented_memory_makes_it_wait():
    running = table_of(max_output=[6], pages_held=[1])
    asked = []

    def allocatable(num_pages):
        asked.append(num_pages)
        return False

    assert verdict(running, allocatable, pages_reserved_at_once=4, pages_free=9) is Verdict.WAIT
    assert asked == [4]


def test_running_request_beyond_its_worst_case_gives_nothing_back():
    running = table_of(max_output=[6, 38], pages_held=[9, 1])
    assert verdict(running, pages_at_most=2, pages_free=4) is Verdict.ADMIT
    assert verdict(running, pages_at_most=3, pages_free=4) is Verdict.WAIT


MAKES = {
    "radix": {"cache": Radix()},
    "prefill_first": {"batching": PrefillFirst()},
    "no cache": {"cache": NoCache()},
    "contiguous": {"cache": NoCache(), "allocator": Contiguous(16)},
}


@pytest.mark.parametrize(("make", "overlap"), [(m, m != "no cache") for m in MAKES])
def test_nothing_is_ever_preempted_in_a_random_run(make, overlap):
    rng = np.random.default_rng(5)
    engine = make_engine(
        pages=16, budget=32, overlap=overlap, admission=ReserveMax(), **MAKES[make]
    )
    arrivals = [
        Arrival(
            int(rng.integers(0, 20)),
            f"r{i}",
            int(rng.integers(1, 100)),
            int(rng.integers(1, 60)),
            ("base", int(rng.integers(0, 40))),
            params={"n": int(rng.integers(1, 3))},
        )
        for i in range(14)
    ]
    out = run(engine, arrivals)
    assert out.preemptions() == 0
    assert not out.choices("unadmitted")
    assert max(event.record.running for event in out.events) > 1
    assert {record.finish_reason for record in out.records.values()} == {"length"}


def test_default_admission_does_preempt_in_such_a_run():
    """The run above is tight enough to tell the two apart."""
    out = run(make_engine(pages=16, budget=32), [Arrival(i, f"r{i}", 50, 60) for i in range(6)])
    assert out.preemptions() > 0
