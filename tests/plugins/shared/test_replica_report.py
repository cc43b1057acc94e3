"""A replica's report: the engine's own books, worked out by hand."""

import pytest

from core.records import StepRecord
from plugins.shared.replica_report import Reporter
from plugins.shared.routing import DeviceFacts
from tests.engine_harness import Arrival, finish, make_engine


def test_an_idle_engine_has_nothing_to_do():
    reporter = Reporter("a")
    snapshot = reporter.snapshot(make_engine(pages=20))
    assert (snapshot.replica, snapshot.number, snapshot.received) == ("a", 1, 0)
    assert (snapshot.pool_pages, snapshot.pages_free, snapshot.page_size) == (20, 20, 16)
    assert (snapshot.running, snapshot.waiting, snapshot.prompt_tokens) == (0, 0, 0)
    assert (snapshot.pages_promised, snapshot.kv_tokens, snapshot.step_s) == (0, 0, None)
    assert snapshot.device == DeviceFacts()


def test_figures_are_of_what_runs_and_what_waits():
    """Two slots, 64 tokens a step, outputs expected at their limit of 16.

    After two steps A (40) has 41 tokens computed and 42 known, B (100) the other 63 of the second
    step; C (50) waits. To their ends A takes ceil(56 / 16) = 4 pages and holds 3, B 8 and holds 4,
    C 5. Prefill left: 37 of B and 50."""
    engine, reporter = make_engine(pages=20, seqs=2), Reporter("a")
    engine.submit(Arrival(0, "A", 40, 16).request())
    for later in ((("B", 100), ("C", 50)), ()):
        event = engine.step()
        assert event is not None
        reporter.took(event.record)
        for name, prompt in later:
            engine.submit(Arrival(0, name, prompt, 16).request())
    snapshot = reporter.snapshot(engine, DeviceFacts(temperature_c=50.0))
    assert (snapshot.running, snapshot.waiting) == (2, 1)
    assert (snapshot.kv_tokens, snapshot.prompt_tokens) == (41 + 63, 37 + 50)
    assert snapshot.pages_promised == 1 + 4 + 5
    assert (snapshot.pages_free, snapshot.pages_evictable) == (20 - 7, 0)
    assert snapshot.device.temperature_c == 50.0


def test_a_finished_request_leaves_its_cache_and_no_work():
    engine, reporter = make_engine(pages=20), Reporter("a", received=4, foreign=1)
    engine.submit(Arrival(0, "A", 40, 3).request())
    finish(engine)
    snapshot = reporter.snapshot(engine)
    assert (snapshot.running, snapshot.pages_promised, snapshot.prompt_tokens) == (0, 0, 0)
    assert (snapshot.pages_free, snapshot.pages_evictable) == (18, 2), "2 whole pages of 42 tokens"
    assert (snapshot.received, snapshot.foreign) == (4, 1)


def test_reports_are_numbered_and_the_step_time_is_a_mean_that_forgets():
    reporter, engine = Reporter("a"), make_engine()
    assert [reporter.snapshot(engine).number for _ in range(3)] == [1, 2, 3]
    reporter.took(StepRecord(0, start_s=0.0, end_s=0.1))
    assert reporter.snapshot(engine).step_s == 0.1
    reporter.took(StepRecord(1, start_s=0.1, end_s=0.36))  # 0.26 s: a sixteenth of the difference
    assert reporter.snapshot(engine).step_s == pytest.approx(0.11)
    reporter.took(StepRecord(2, start_s=1.0, end_s=1.64, steps=32))  # as many as it remembers
    assert reporter.snapshot(engine).step_s == pytest.approx(0.02)
