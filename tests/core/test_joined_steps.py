"""Steps that only decode may go in one in simulated time: the same comes out, to the bit."""

from dataclasses import replace

import numpy as np
import pytest

from core.build import build_engine
from core.config import EngineConfig
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.recent import MOST
from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.simulated import Simulated
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import VirtualClock
from plugins.step_time.fixed import Fixed
from tests.core.policy_tables import ADMISSIONS, BATCHINGS, VICTIMS

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
STARTS = {"decode": 1e-3, "chunk": 8e-3, "mixed": [9e-3, 0.011, 0.02]}  # chunks wait for the host
TIMES = Fixed(step_s=0.007, row_s=1e-5, token_s=3e-5, kv_token_s=1e-7, pair_s=1e-9)


def make(plugins=None, pages=160, seqs=8, overlap=False, **defaults):
    roles = {
        "order": Fcfs(),
        "admission": PromptFits(),
        "batching": Chunked(slice_tokens=32),
        "preemption": LastAdmitted(),
        "allocator": Paged(16),
        "cache": Radix(),
        "evictor": Lru(),
        "cache_admission": AdmitAll(),
        "predictor": MaxTokensShare(),
        "step_time": TIMES,
        "executor": Simulated(
            TIMES,
            vocab_size=500,
            host_s=0.0003,
            host_new_s=0.002,
            graph_sizes=[2, 4, 8],
            launch_s=STARTS,
        ),
    }
    config = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=64,
        pool_tokens=pages * 16,
        overlap=overlap,
        strict=True,
    )
    return build_engine(Hooks(roles | defaults, plugins or {}), config, 0, VirtualClock())


def workload(seed=0, num=24, gap_s=0.15, **params):
    """Lognormal lengths; a third begin alike; gaps long enough for steps that only decode."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 500, 64).astype(np.int32)
    now_s, requests = 0.0, []
    for number in range(num):
        now_s += rng.exponential(gap_s)
        prompt = rng.integers(1, 500, int(rng.integers(5, 120))).astype(np.int32)
        prompt = np.concatenate([shared, prompt]) if number % 3 == 0 else prompt
        requests.append(
            Request(
                f"r{number}",
                prompt,
                SamplingParams(max_tokens=200, **params),
                arrival_s=now_s,
                forced_output=int(rng.integers(1, 90)),
                priority=number % 4,
                client=f"c{number % 3}",
            )
        )
    return requests


def play(engine, requests, joins):
    """All events; joins: let steps go in one up to the next arrival."""
    pending, events = list(requests), []
    while pending or engine.has_work:
        while pending and pending[0].arrival_s <= engine.clock.now():
            engine.submit(pending.pop(0))
        until_s = pending[0].arrival_s if pending else np.inf
        event = engine.step(until_s if joins else 0.0)
        if event is not None:
            events.append(event)
        if pending and (engine.stalled or not engine.has_work):
            engine.clock.wait_until(pending[0].arrival_s)
    return events


def told(engine, events):
    """What a run did: every token with its time and step, every decision, every sum."""
    streams = {
        name: [(c.token_ids.tolist(), c.times_s.tolist(), c.steps.tolist()) for c in r.choices]
        for name, r in engine.records.items()
    }
    ends = {name: (r.admitted_s, r.finished_s, r.preemptions) for name, r in engine.records.items()}
    slots = "slots (engine.max_num_seqs) are taken"  # told once for steps that go in one
    choices = [
        (event.record.step + (event.record.steps - 1 if c.kind == "finished" else 0), c)
        for event in events
        for c in event.record.choices
        if not (c.kind == "refused" and slots in c.reason)
    ]
    sums = {
        name: sum(getattr(event.record, name) for event in events)
        for name in ("steps", "prefill_tokens", "decode_tokens", "sampled_tokens", "kv_tokens")
    }
    sums["attended"] = sum(event.record.attended for event in events)
    return streams, ends, choices, sums, engine.steps


def assert_same(make_one, requests):
    """Returns the events of the run that joins steps, if it may: a policy that listens to steps
    hears too late of a launch where these overlap."""
    runs = []
    for joins in (False, True):
        engine = make_one()
        runs.append((engine, play(engine, requests, joins)))
    apart, joined = (told(*one) for one in runs)
    for one, other in zip(apart, joined, strict=True):
        assert one == other
    apart_for = engine.state.config.overlap and engine.hooks.listens
    joined_some = len(runs[1][1]) < len(runs[0][1])
    assert joined_some is not apart_for, "whether steps went with others"
    return runs[1][1]


@OVERLAP
@pytest.mark.parametrize("seqs", [3, 8, 24])
def test_steps_in_one_are_the_same_steps(seqs, overlap):
    events = assert_same(lambda: make(seqs=seqs, overlap=overlap), workload())
    longest = max(event.record.steps for event in events)
    assert 1 < longest <= MOST
    for event in events:
        record = event.record
        tokens = len(event.rows) * record.steps - event.num_late * (record.slices - 1)
        assert len(event.token_ids) == len(event.rows)
        assert tokens == record.sampled_tokens
        assert record.steps > 1 or record.prefill_tokens == record.last_prefill_tokens


def test_the_last_step_of_some_ends_requests():
    events = play(make(), workload(), True)
    assert any(event.finished and event.record.steps > 1 for event in events)


@OVERLAP
def test_they_are_the_same_under_memory_pressure(overlap):
    def one():
        return make(pages=24, admission=PromptFits(growth_share=0), overlap=overlap)

    events = assert_same(one, workload())
    assert sum(c.kind == "preempted" for event in events for c in event.record.choices) > 2


@OVERLAP
def test_they_are_the_same_when_contexts_outgrow_what_the_host_takes(overlap):
    """The host, slower than the device at first, is still behind when steps become longer."""
    times = Fixed(step_s=0.0, token_s=0.0, kv_token_s=1e-5)
    starts = {"decode": 8e-4}  # as long as a step that reads 80 tokens

    def one():
        device = Simulated(times, vocab_size=500, host_s=1e-5, launch_s=starts)
        return make(seqs=1, overlap=overlap, step_time=times, executor=device)

    prompt, params = np.arange(1, 41, dtype=np.int32), SamplingParams(max_tokens=120)
    assert_same(one, [Request("a", prompt, params, forced_output=120)])


@OVERLAP
@pytest.mark.parametrize("name", BATCHINGS)
def test_every_batching_policy_is_steady(name, overlap):
    def one():
        return make({"mine": BATCHINGS[name]()}, overlap=overlap)

    assert one().hooks.steady
    assert_same(one, workload(gap_s=0.4))


@OVERLAP
@pytest.mark.parametrize("name", [*ADMISSIONS, *(f"victims:{name}" for name in VICTIMS)])
def test_other_policies_decide_the_same(name, overlap):
    kind, _, rest = name.partition(":")
    makers = VICTIMS[rest] if rest else ADMISSIONS[kind]

    def one():
        return make(makers(), pages=40, overlap=overlap)

    assert one().hooks.steady
    assert_same(one, workload(gap_s=0.4))


def test_nothing_is_joined_where_a_plugin_may_change_its_mind():
    class Moody:
        @hookimpl
        def decide_batch(self, query):
            return None

    class Watches:
        @hookimpl
        def on_step(self, query):
            pass

    for plugin in (Moody(), Watches()):
        engine = make({"mine": plugin})
        assert not engine.hooks.steady
        assert all(event.record.steps == 1 for event in play(engine, workload(num=4), True))


def test_nothing_is_joined_where_a_token_may_end_a_request():
    engine = make()
    free = [
        Request("a", np.arange(1, 20, dtype=np.int32), SamplingParams(max_tokens=50)),
    ]
    assert all(event.record.steps == 1 for event in play(engine, free, True))


def test_a_step_goes_on_alone_when_the_next_request_is_due():
    engine = make()
    first = Request(
        "a", np.arange(1, 20, dtype=np.int32), SamplingParams(max_tokens=90), forced_output=80
    )
    engine.submit(first)
    engine.step(np.inf)
    event = engine.step(engine.clock.now() + 1e-9)
    assert event.record.steps == 1
    event = engine.step(np.inf)
    assert event.record.steps == MOST


def alone(engine, num_tokens=80):
    """Records of one request of a 19-token prompt, with nobody beside it."""
    params = SamplingParams(max_tokens=90)
    engine.submit(Request("a", np.arange(1, 20, dtype=np.int32), params, forced_output=num_tokens))
    records = []
    while engine.has_work:
        event = engine.step(np.inf)
        records += [] if event is None else [event.record]
    return records


@OVERLAP
def test_the_step_in_which_a_request_ends_goes_with_those_before_it(overlap):
    records = alone(make(overlap=overlap))
    assert [record.steps for record in records] == [1, MOST, 80 - 1 - MOST]
    assert [record.sampled_tokens for record in records] == [1, MOST, 80 - 1 - MOST]
    assert [c.kind for c in records[-1].choices] == ["finished"]


def test_all_but_the_last_token_of_a_launch_are_known_while_the_next_is_planned():
    engine = make(overlap=True)
    params = SamplingParams(max_tokens=90)
    engine.submit(Request("a", np.arange(1, 20, dtype=np.int32), params, forced_output=80))
    engine.step(np.inf)
    engine.step(np.inf)
    table, slot = engine.state.table, int(engine.state.running[0])
    assert (int(table.known[slot]), int(table.in_flight[slot])) == (19 + MOST, 1)
    assert not engine.ending
    engine.step(np.inf)
    assert engine.ending, "its last token is in flight"


@OVERLAP
def test_steps_go_on_past_the_end_of_a_prompt(overlap):
    """Five slices of 32 tokens, the last one shorter; then each step has one token."""
    params, prompt = SamplingParams(max_tokens=90), np.arange(1, 150, dtype=np.int32)
    runs = []
    for until_s in (0.0, np.inf):
        device = Simulated(TIMES, vocab_size=500, host_s=0.0003)
        engine = make(overlap=overlap, executor=device)
        engine.submit(Request("a", prompt, params, forced_output=40))
        events = []
        while engine.has_work:
            if (event := engine.step(until_s)) is not None:
                events.append(event)
        runs.append((told(engine, events), [event.record for event in events]))
    (apart, _), (joined, records) = runs
    assert apart == joined
    (record,) = records
    assert (record.steps, record.slices) == (44, 5)
    assert (record.prefill_tokens, record.decode_tokens, record.sampled_tokens) == (149, 39, 40)
    assert record.last_prefill_tokens == 0


def test_choices_that_start_at_the_end_of_a_prompt_start_there():
    device = Simulated(TIMES, vocab_size=500, host_s=0.0003)
    requests = [replace(r, params=replace(r.params, n=2)) for r in workload(num=8, gap_s=0.5)]
    events = assert_same(lambda: make(executor=device), requests)
    assert max(event.record.slices for event in events) > 1
