"""A fault is that of one request, not of the next one with its id."""

import pytest

from tests.core.hook_spies import spy
from tests.engine_harness import Arrival, make_engine


@pytest.mark.parametrize("overlap", [False, True])
def test_fault_of_a_request_that_ended_meanwhile_does_not_fail_its_successor(overlap):
    def fail_once(query):
        if not failed:
            failed.append(query.request.request_id)
            raise ZeroDivisionError("told to fail")

    failed = []
    plugin = spy("decide_cache_admission", fail_once)
    engine = make_engine(plugins={"broken": plugin}, contains_faults=True, overlap=overlap)
    engine.submit(Arrival(0, "A", 20, 1).request())  # its first step is its last
    while engine.state.live or engine._inbox:
        engine.step()
    assert failed == ["A"]
    engine.submit(Arrival(0, "A", 20, 3).request())
    while engine.has_work:
        engine.step()
    assert (engine.records["A"].finish_reason, engine.records["A"].error) == ("length", "")
