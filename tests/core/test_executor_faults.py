"""An executor that fails: a launch it cannot make ends that launch's requests, anything else ends
all of them . Every scenario runs in strict mode."""

from functools import partial

import numpy as np
import pytest

from core.errors import EngineStoppedError, LaunchError
from core.hookspecs import hookimpl
from core.invariants import check_invariants
from core.keys import page_keys
from plugins.admission.prompt_fits import PromptFits
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake, FakeExecutor
from plugins.mode.bench import Bench
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import summarise
from tests.engine_harness import (
    VOCAB,
    Arrival,
    check_alive,
    check_idle,
    finish,
    make_engine,
    prompt,
    run,
)
from tests.plugins.mode.mode_session import Given, Recorder, make_session

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
FULL = partial(LaunchError, "2 GiB asked, 1 GiB free")
LOST = partial(RuntimeError, "CUDA error: an illegal memory access was encountered")


class Faulty(Fake):
    """Scripted, but raises `error()` at the calls of `method` whose numbers are in `at`."""

    def __init__(self, error, at, method="launch", **options):
        super().__init__(**({"vocab_size": VOCAB, "max_model_len": 1024} | options))
        self.error, self.at, self.method = error, set(at), method

    @hookimpl
    def build_executor(self, query):
        return FaultyExecutor(self, query.clock)


class FaultyExecutor(FakeExecutor):
    def __init__(self, plugin, clock):
        super().__init__(plugin, clock)
        self.calls = {"launch": 0, "collect": 0}
        self.before_raising = lambda: None
        self.failed = []  # of each failed launch: it, and how many were in flight

    def launch(self, launch):
        self.raise_if_due("launch", launch)
        super().launch(launch)

    def collect(self):
        self.raise_if_due("collect", None)
        return super().collect()

    def raise_if_due(self, method, launch):
        number = self.calls[method]
        self.calls[method] += 1
        if method == self._plugin.method and number in self._plugin.at:
            self.before_raising()
            self.failed.append((launch, len(self._pending)))
            raise self._plugin.error()


def faulty_engine(at, overlap, error=FULL, method="launch", **options):
    return make_engine(executor=Faulty(error, at, method), overlap=overlap, **options)


def cached_pages(engine, tokens):
    tokens = np.array(tokens, np.int32)
    keys = page_keys(tokens, 16)
    return len(engine.state.memory.cache.match(keys, tokens[: len(keys) * 16], "").pages)


def failed_names(out):
    return {name for name in out.records if out.reason(name) == "error"}


@OVERLAP
@pytest.mark.parametrize("cache", [Radix, NoCache])
@pytest.mark.parametrize("at", range(8))
def test_a_launch_that_cannot_be_made_ends_its_requests_and_no_others(at, cache, overlap):
    """Two run at a time: A in chunks, then decoding beside B, and C and D behind them."""
    engine = faulty_engine([at], overlap, seqs=2, pages=32, cache=cache())
    arrivals = [Arrival(0, "A", 100, 4), Arrival(0, "B", 20, 12)]
    arrivals += [Arrival(0, "C", 40, 9), Arrival(0, "D", 10, 3)]
    out = run(engine, arrivals)
    ((launch, in_flight),) = engine.executor.failed
    assert in_flight == (1 if overlap and at else 0)
    failed = failed_names(out)
    assert 1 <= len(failed) == len(launch.row_ids) <= 2
    for name in failed:
        message = f"request {name!r} ended: 2 GiB asked, 1 GiB free"
        assert out.records[name].error == message
        assert [choice.reason for choice in out.choices("finished", name)] == [message]
    for arrival in arrivals:
        if arrival.name not in failed:
            assert len(out.tokens(arrival.name)) == arrival.output_tokens
    check_alive(engine)


@OVERLAP
def test_its_step_is_recorded_as_one_that_launched_nothing(overlap):
    engine = faulty_engine([3], overlap)
    out = run(engine, [Arrival(0, "A", 20, 9)])
    (record,) = [event.record for event in out.events if event.record.step == 3]
    assert (record.num_rows, record.rows, record.launched_s) == (0, [], 0.0)
    counted = record.prefill_tokens, record.decode_tokens, record.recomputed_tokens
    assert counted == (0, 0, 0)
    assert out.records["A"].choices[0].token_ids
    assert out.records["A"].computed_tokens == 20 + 2, "of three launches, not of the fourth"
    assert [(choice.kind, choice.request_id) for choice in record.choices] == [("finished", "A")]
    totals = StepTotals(16, 16)
    for one in out.events:
        totals.add(one.record)
    assert totals.counts["launches"] == 3
    assert summarise(out.records.values(), totals)["requests"]["first_error"].startswith("request")


@OVERLAP
def test_pages_that_it_was_to_write_are_not_cached_and_earlier_ones_are(overlap):
    engine = faulty_engine([1], overlap, pages=32)
    cached = []
    out = run(
        engine,
        [Arrival(0, "A", 128, 9), Arrival(4, "B", 128, 9, ("A", 128))],
        before_step=lambda step: (
            step == 4 and cached.append(cached_pages(engine, prompt("A", 128)))
        ),
    )
    assert (out.reason("A"), out.reason("B")) == ("error", "length")
    assert cached == [4], "pages of the first chunk, which was made"
    assert out.records["B"].cached_tokens == 64


def test_the_last_token_of_a_request_in_the_launch_before_still_counts():
    """A ends with the launch in flight; B is in both."""
    engine = faulty_engine([3], overlap=True)
    out = run(engine, [Arrival(0, "A", 20, 3), Arrival(0, "B", 20, 30)])
    assert engine.executor.failed[0][1] == 1
    assert (out.reason("A"), len(out.tokens("A"))) == ("length", 3)
    assert (out.reason("B"), len(out.tokens("B"))) == ("error", 2)


@OVERLAP
def test_all_choices_end_with_the_launch_of_one(overlap):
    engine = faulty_engine([3], overlap, pages=32)
    out = run(engine, [Arrival(0, "A", 40, 30, params={"n": 3, "seed": 1})])
    assert [choice.finish_reason for choice in out.records["A"].choices] == ["error"] * 3
    assert engine.state.finish_counts == {"error": 1}


@OVERLAP
def test_failures_in_a_row_are_no_standstill(overlap):
    engine = faulty_engine(range(12), overlap, seqs=1)
    out = run(engine, [Arrival(0, f"r{i}", 20, 3) for i in range(14)])
    assert failed_names(out) == {f"r{i}" for i in range(12)}
    check_alive(engine)


@OVERLAP
@pytest.mark.parametrize("seed", range(1, 7))
def test_any_launches_may_fail_under_pressure(seed, overlap):
    """Twelve requests with shared prefixes in a pool for three: preempted, resumed, failing."""
    random = np.random.default_rng(seed)
    at = np.flatnonzero(random.random(200) < 0.05).tolist()
    engine = faulty_engine(at, overlap, pages=10, admission=PromptFits(growth_share=0.0))
    arrivals = [
        Arrival(int(random.integers(20)), f"r{i}", int(random.integers(1, 60)), 30, ("r0", 16))
        for i in range(12)
    ]
    out = run(engine, arrivals)
    assert out.preemptions() > 0
    assert failed_names(out)
    for name in out.records.keys() - failed_names(out):
        assert len(out.tokens(name)) == 30
    engine.executor._plugin.at.clear()
    check_alive(engine)


@OVERLAP
@pytest.mark.parametrize("method", ["launch", "collect"])
@pytest.mark.parametrize("at", range(4))
def test_a_lost_device_ends_every_request_with_its_reason(at, method, overlap):
    recorder = Recorder()
    engine = faulty_engine([at], overlap, LOST, method, seqs=2, plugins={"spy": Spy()})
    engine.sinks.append(recorder.build_sink(None))
    for name in "ABC":  # C waits
        engine.submit(Arrival(0, name, 20, 9).request())
    tokens = 0
    while engine.executor.calls[method] < at:
        event = engine.step()
        tokens += len(event.token_ids) if event else 0
    engine.executor.before_raising = lambda: submit_and_abort(engine, "D", "C")
    with pytest.raises(RuntimeError, match="an illegal memory access") as raised:
        finish(engine)
    note = "the engine stopped: every unfinished request ended with this error"
    assert raised.value.__notes__ == [note]
    errors = {name: record.error for name, record in engine.records.items()}
    reason = f"the engine stopped: RuntimeError: {raised.value}"
    assert errors == {"A": reason, "B": reason, "C": "", "D": reason}
    assert engine.records["C"].finish_reason == "abort"
    spy = engine.hooks.registered["spy"].plugin
    assert sorted(spy.finished) == sorted(one.request_id for one in recorder.requests)
    assert sorted(spy.finished) == sorted(engine.records)
    assert sum(record.output_tokens for record in engine.records.values()) == tokens
    assert not engine.has_work
    check_invariants(engine.state, [])
    check_idle(engine)
    with pytest.raises(EngineStoppedError, match="an illegal memory access"):
        engine.submit(Arrival(0, "E", 20, 9).request())
    with pytest.raises(EngineStoppedError, match="an illegal memory access"):
        engine.step()
    assert "E" not in engine.records


def submit_and_abort(engine, new, old):
    engine.submit(Arrival(0, new, 20, 9).request())
    engine.abort(old)


class Spy:
    def __init__(self):
        self.finished = []

    @hookimpl
    def on_request_finished(self, query):
        self.finished.append(query.record.request_id)


@OVERLAP
def test_bench_fails_with_the_reason_and_its_sinks_have_the_requests(tmp_path, overlap):
    recorder = Recorder()
    requests = [Arrival(0, name, 20, 9).request() for name in "AB"]
    executor = Faulty(LOST, [2], "collect", vocab_size=VOCAB, max_model_len=512)
    session = make_session(tmp_path, Given(requests), executor=executor, recorder=recorder)
    session.engine.overlap = overlap
    with pytest.raises(RuntimeError, match="an illegal memory access") as raised:
        Bench().run(session)
    assert recorder.failed is raised.value
    assert [one.finish_reason for one in recorder.requests] == ["error", "error"]
    assert recorder.closed is None
