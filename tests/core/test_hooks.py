"""The hook contract: each hook is asked when its docstring says, with what it says, and the answer
is used. One `test_hook_<name>` a hook; the last tests see to it that none is forgotten."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from core import queries
from core.errors import PolicyError
from core.queries import (
    AdmissionDecision,
    BatchDecision,
    CacheAdmissionDecision,
    Cause,
    OrderDecision,
    PreemptionDecision,
    Verdict,
)
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import PagedAllocator
from plugins.cache.lru import LruEvictor
from plugins.cache.radix import RadixTree
from plugins.executor.fake import Fake
from plugins.shared import model_protocols
from plugins.shared.routing import RouteDecision
from plugins.shared.run_info import SinkQuery
from plugins.step_time.fixed import Fixed
from tests.core.hook_spies import LoggingSink, play_bench, spied, spy
from tests.engine_harness import Arrival, finish, make_engine, run
from tests.plugins.mode.mode_session import VOCAB
from tests.plugins.mode.test_serve import Scripted, ask, serve
from tests.plugins.router import route_tables

ROOT = Path(__file__).parents[2]


def test_hook_decide_order():
    seen = spy("decide_order", lambda q: OrderDecision(-q.waiting.prompt.astype(float)))
    out = spied(seen, [Arrival(0, n, p, 2) for n, p in [("A", 5), ("B", 30), ("C", 20)]], seqs=1)
    assert sorted("ABC", key=out.first_token_step) == ["B", "C", "A"]
    (query,) = seen.asked  # arrived together, and the keys hold
    assert query.waiting.prompt.tolist() == [5, 30, 20]
    assert (query.now_s, query.step) == (0.0, 0)


def test_hook_decide_admission():
    def odd_only(query):
        skip = query.candidate.prompt[0] % 2 == 0 and len(query.running)
        return AdmissionDecision(Verdict.SKIP if skip else Verdict.ADMIT, "odd first")

    seen = spy("decide_admission", odd_only)
    names = [("A", 33), ("B", 20), ("C", 35), ("D", 37)]
    out = spied(seen, [Arrival(0, n, p, 4) for n, p in names], seqs=3, budget=200)
    assert [choice.request_id for choice in out.choices("admitted")] == ["A", "C", "D", "B"]
    assert {choice.plugin for choice in out.choices("admitted")} == {"spy"}
    assert out.choices("skipped")[0].reason == "odd first"
    first = seen.asked[0]
    assert (first.cached_tokens, first.pages_needed, first.pages_at_most) == (0, 3, 3)
    assert (first.pages_free, first.pages_evictable, first.pool_pages) == (16, 0, 16)
    assert (first.page_size, first.pages_reserved_at_once, first.waiting) == (16, 0, 4)
    assert (len(first.candidate), len(first.running)) == (1, 0)
    third = seen.asked[2]
    assert third.running.prompt.tolist() == [33]
    assert third.pages_promised == 3, "A was admitted in this step and holds nothing yet"
    assert [third.allocatable(16), third.allocatable(17)] == [True, False]


def test_hook_decide_batch():
    def one_at_a_time(query):
        return BatchDecision(query.running.id[:1], query.running.remaining[:1], "one")

    seen = spy("decide_batch", one_at_a_time)
    out = spied(seen, [Arrival(0, "A", 20, 3), Arrival(0, "B", 20, 3)])
    assert [event.record.rows for event in out.events[:3]] == [
        [("A", 0, 20)],
        [("A", 0, 1)],
        [("A", 0, 1)],
    ]
    assert {(e.record.batch_plugin, e.record.batch_reason) for e in out.events} == {("spy", "one")}
    query = seen.asked[0]
    assert query.running.prompt.tolist() == [20, 20]
    assert (query.token_limit, query.waiting, query.replanning) == (64, 0, False)
    steps = [query.step for query in seen.asked]
    assert steps == sorted(set(steps)), "once a step"


def test_hook_decide_preemption():
    seen = spy("decide_preemption", lambda q: PreemptionDecision(q.candidates.id, "first in"))
    out = spied(seen, [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)], pages=9)
    (choice, *_) = out.choices("preempted")
    assert (choice.request_id, choice.plugin, choice.reason) == ("A", "spy", "first in")
    assert choice.detail == {"cause": "pages", "pages_freed": 1, "lost_tokens": 65}
    query = seen.asked[0]
    assert query.cause is Cause.PAGES
    assert query.candidates.prompt.tolist() == [60, 60]
    assert query.pages_short == 1
    assert query.beneficiary is None
    assert isinstance(query.random, np.random.Generator)
    assert "B" not in [choice.request_id for choice in out.choices("preempted")]


def test_hook_decide_cache_admission():
    seen = spy("decide_cache_admission", lambda q: CacheAdmissionDecision(q.num_tokens > 40))
    arrivals = [
        Arrival(0, "A", 33, 20),
        Arrival(30, "B", 60, 20),
        Arrival(60, "A2", 33, 2, ("A", 33)),
        Arrival(90, "B2", 60, 2, ("B", 60)),
        Arrival(120, "tiny", 3, 2),
        Arrival(130, "off", 40, 2, fields={"cache": False}),
    ]
    out = spied(seen, arrivals)
    asked = [(q.request.request_id, q.num_tokens, q.cached_tokens) for q in seen.asked]
    assert asked == [("A", 33, 0), ("B", 60, 0), ("A2", 33, 0), ("B2", 60, 48), ("tiny", 3, 0)]
    assert out.records["A2"].cached_tokens == 0, "A was not kept"
    assert out.records["B2"].cached_tokens == 48


def test_hook_decide_cache_admission_of_a_leading_part():
    answer = CacheAdmissionDecision(True, num_tokens=47)  # two whole pages of 16
    arrivals = [Arrival(0, "A", 60, 20), Arrival(30, "A2", 60, 2, ("A", 60))]
    out = spied(spy("decide_cache_admission", lambda q: answer), arrivals)
    assert out.records["A2"].cached_tokens == 32
    wrong = spy("decide_cache_admission", lambda q: CacheAdmissionDecision(True, num_tokens=-1))
    with pytest.raises(PolicyError, match="of spy: num_tokens must be >= 0 or None, got -1"):
        spied(wrong, arrivals)


def built(hook, make, **defaults):
    """An engine whose `hook` is answered by a spy with `make(query)`."""
    seen = spy(hook, make)
    return seen, make_engine(plugins={"spy": seen}, **defaults)


def test_hook_build_allocator():
    seen, engine = built("build_allocator", lambda q: PagedAllocator(q.pool_tokens // 4, 4))
    (query,) = seen.asked
    assert query == queries.AllocatorQuery(pool_tokens=256, max_model_len=1024)
    assert engine.state.memory.page_size == 4
    assert engine.state.memory.ledger.num_pages == 64


def test_hook_build_prefix_cache():
    seen, engine = built("build_prefix_cache", lambda q: RadixTree(q.page_size, q.evictor))
    (query,) = seen.asked
    assert query.page_size == 16
    assert isinstance(query.evictor, LruEvictor)
    assert isinstance(engine.state.memory.cache, RadixTree)


def test_hook_build_evictor():
    popped = []

    class Newest(LruEvictor):
        def pop(self):
            popped.append(1)
            return super().pop()

    seen, engine = built("build_evictor", lambda _: Newest(), pages=4)
    assert seen.asked == [queries.EvictorQuery(page_size=16)]
    run(engine, [Arrival(0, "A", 60, 1), Arrival(5, "B", 60, 1)])
    assert popped


def test_hook_build_length_predictor():
    class Always7:
        def __init__(self):
            self.observed = []

        def predict(self, request):
            return 7.0

        def observe(self, record):
            self.observed.append((record.request_id, record.output_tokens))

    predictor = Always7()
    seen, engine = built("build_length_predictor", lambda _: predictor, seed=5)
    assert seen.asked == [queries.LengthPredictorQuery(seed=5)]
    engine.submit(Arrival(0, "A", 10, 20).request())
    engine.step()
    assert engine.state.table.view(engine.state.running).predicted_output.tolist() == [7.0]
    finish(engine)
    assert predictor.observed == [("A", 20)]


@pytest.mark.parametrize("oracle", [False, True])
def test_a_forced_length_is_shown_to_an_oracle_alone(oracle):
    class Predictor:
        def predict(self, request):
            return float(request.forced_output or 0)

        def observe(self, record):
            pass

    shown = []
    spies = {
        "decide_order": lambda q: [shown.append(q.request(int(i))) for i in q.waiting.id] and None,
        "decide_admission": lambda q: shown.append(q.request(int(q.candidate.id[0]))),
        "decide_cache_admission": lambda q: shown.append(q.request),
        "on_request_arrived": lambda q: shown.append(q.request),
        "on_request_finished": lambda q: shown.append(q.request),
    }
    plugins = {hook: spy(hook, answer) for hook, answer in spies.items()}
    plugins["guess"] = spy("build_length_predictor", lambda q: Predictor(), oracle=oracle)
    engine = make_engine(plugins=plugins)
    engine.submit(Arrival(0, "A", 20, 9, fields={"forced_output": 7}).request())
    engine.step()
    assert engine.hooks.oracle is oracle
    predicted = engine.state.table.view(engine.state.running).predicted_output
    assert predicted.tolist() == [7.0 if oracle else 0.0]
    finish(engine)
    assert engine.records["A"].output_tokens == 7
    assert [(r.request_id, r.forced_output) for r in shown] == [("A", None)] * len(spies)


def test_hook_build_step_time_model():
    given = []
    asking = {
        "decide_batch": lambda q: given.append(q.step_time),
        "decide_admission": lambda q: given.append(q.step_time),
        "decide_preemption": lambda q: given.append(q.step_time),
    }
    plugins = {hook: spy(hook, answer) for hook, answer in asking.items()}
    model = Fixed(step_s=3.0)
    plugins["model"] = seen = spy("build_step_time_model", lambda q: model)
    engine = make_engine(pages=8, plugins=plugins, admission=PromptFits(growth_share=0))
    run(engine, [Arrival(0, "A", 60, 40), Arrival(0, "B", 50, 40)])
    assert len(seen.asked) == 1
    assert plugins["decide_preemption"].asked
    assert all(one is model for one in given)


def executor_that_wants(*parts):
    """An executor plugin that builds the model and the attention backend."""

    def make(query):
        parts[0](query)
        return Fake().build_executor(query)

    return make


def test_hook_build_model():
    model = spy("build_model", lambda _: "the model")
    got = []
    wants = spy("build_executor", executor_that_wants(lambda q: got.extend([q.model(), q.model()])))
    make_engine(seed=3, plugins={"model": model, "wants": wants})
    assert got == ["the model", "the model"]
    assert model.asked == [queries.ModelQuery(device="cpu", seed=3, progress=False)], "once"
    unasked = spy("build_model")
    make_engine(plugins={"model": unasked})
    assert unasked.asked == [], "the scripted executor wants no model"


def test_hook_build_attention():
    shape = model_protocols.AttentionQuery(4, 2, 8, "float32", "float32", 16, "cpu")
    attention = spy("build_attention", lambda _: "the backend")
    got = []
    wants = spy("build_executor", executor_that_wants(lambda q: got.append(q.attention(shape))))
    make_engine(plugins={"attention": attention, "wants": wants})
    assert got == ["the backend"]
    assert attention.asked == [shape]


def test_hook_build_executor():
    mine = Fake(vocab_size=17, max_model_len=33)
    seen, engine = built("build_executor", mine.build_executor, seed=9)
    (query,) = seen.asked
    assert (query.engine, query.seed, query.clock) == (
        engine.state.config,
        9,
        engine.clock,
    )
    assert (engine.state.vocab_size, engine.state.max_model_len) == (17, 33)


def test_hook_build_sink(tmp_path):
    logs = {"one": [], "two": []}
    sinks = {
        name: spy("build_sink", lambda _, log=log: LoggingSink(log)) for name, log in logs.items()
    }
    run_info, _ = play_bench(tmp_path, sinks | {"none": spy("build_sink")}, [Arrival(0, "A", 9, 3)])
    assert sinks["one"].asked == [SinkQuery(run_info, str(tmp_path))]
    expected = [("step", 0), ("step", 1), ("step", 2), ("request", "A"), ("close", 1)]
    assert logs == {"one": expected, "two": expected}, "every answer is used"


def test_hook_build_server(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the device's lock: not other tests'
    server = Scripted({1: [ask("A")]})
    seen = spy("build_server", lambda _: server)
    serve(tmp_path, seen)
    (query,) = seen.asked
    assert (query.folder, query.facts["vocab_size"]) == (str(tmp_path), VOCAB)
    assert (server.ended, server.closed) == ([("A", "length")], 1)


def test_hook_decide_route():
    """Asked once for each request, by the router; the answer is where it goes and counts."""
    seen = spy("decide_route", lambda q: RouteDecision(q.replicas.ids[-1], reason="the last"))
    made = route_tables.snapshot
    rig = route_tables.Rig(seen, [made("a"), made("b", pages_free=60, foreign=2)])
    request = route_tables.ask("r1", prompt=100, forced_output=9)
    ticket = rig.router.route(request, 28.0, 0.5)
    rig.router.route(route_tables.ask("r2", prompt=100), 28.0, 0.75)
    first, second = seen.asked
    assert (ticket.replica, ticket.request_id) == ("b", "r1")
    assert (first.request.request_id, first.request.forced_output) == ("r1", None)
    assert (first.predicted_output, first.now_s, first.replicas.ids) == (28.0, 0.5, ("a", "b"))
    assert first.replicas.pages_free.tolist() == [100, 60]
    assert first.replicas.requests.tolist() == [0, 2]
    assert second.replicas.requests.tolist() == [0, 3], "the first is counted at once"
    assert [query.cached_tokens().tolist() for query in seen.asked] == [[0, 0], [0, 96]]
    assert [(r.plugin, r.reason) for r in rig.records] == [("router", "the last")] * 2


def test_hook_on_run_start(tmp_path):
    start, step = spy("on_run_start"), spy("on_step", lambda _: order.append("step"))
    order = []
    start = spy("on_run_start", lambda _: order.append("start"))
    run_info, _ = play_bench(tmp_path, {"start": start, "step": step}, [Arrival(0, "A", 9, 2)])
    assert start.asked == [run_info]
    assert order == ["start", "step", "step"]


def test_hook_on_run_end(tmp_path):
    end = spy("on_run_end")
    _, summary = play_bench(tmp_path, {"end": end}, [Arrival(0, "A", 9, 2)])
    assert end.asked == [summary]


def test_hook_on_step():
    first, second = spy("on_step"), spy("on_step")
    engine = make_engine(plugins={"first": first, "second": second})
    out = run(engine, [Arrival(0, "A", 9, 3), Arrival(1, "B", 9, 2)])
    assert first.asked == second.asked == out.events, "every plugin is called, after each step"
    event = first.asked[1]
    assert event.rows == [("A", 0), ("B", 0)]
    assert event.token_ids.tolist() == [out.tokens("A")[1], out.tokens("B")[0]]
    assert [record.request_id for record in first.asked[2].finished] == ["A", "B"]


def test_hook_on_request_arrived():
    seen = spy("on_request_arrived", lambda q: reasons.append(q.record.finish_reason))
    reasons = []
    out = spied(seen, [Arrival(0, "A", 9, 3), Arrival(2, "huge", 900, 3)])
    assert [query.request for query in seen.asked] == [out.requests["A"], out.requests["huge"]]
    assert [query.record for query in seen.asked] == [out.records["A"], out.records["huge"]]
    assert reasons == ["", "capacity"], "waiting, or refused at once"


def test_hook_on_request_finished():
    seen = spy("on_request_finished")
    engine = make_engine(plugins={"spy": seen})
    arrivals = [Arrival(0, "A", 9, 3), Arrival(0, "B", 9, 30), Arrival(1, "huge", 900, 3)]
    out = run(engine, arrivals, aborts={"B": 5})
    ended = [(q.request.request_id, q.record.finish_reason) for q in seen.asked]
    assert ended == [("huge", "capacity"), ("A", "length"), ("B", "abort")]
    assert all(query.record is out.records[query.request.request_id] for query in seen.asked)
