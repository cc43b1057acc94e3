"""An exception in a hook that concerns one request: it fails that request alone where the engine
serves, and goes on to the caller elsewhere."""

import logging

import pytest

from core.queries import AdmissionDecision, PreemptionDecision, Verdict
from plugins.admission.prompt_fits import PromptFits
from tests.core.hook_spies import spy
from tests.engine_harness import Arrival, check_alive, make_engine, run

PER_REQUEST = {  # hook -> the request a query is about
    "decide_admission": lambda q: q.request(int(q.candidate.id[0])).request_id,
    "decide_cache_admission": lambda q: q.request.request_id,
    "on_request_arrived": lambda q: q.request.request_id,
}
HOOKS = pytest.mark.parametrize("hook", PER_REQUEST)
OVERLAP = pytest.mark.parametrize("overlap", [False, True])
ARRIVALS = [Arrival(0, name, 40, 12) for name in "ABCD"] + [Arrival(5, "late", 20, 4)]


def fails_over(name, hook, about):
    """A plugin that raises for one request at one hook, and leaves the rest to the default."""

    def answer(query):
        if about(query) == name:
            raise ZeroDivisionError("told to fail")

    return spy(hook, answer)


@HOOKS
@OVERLAP
@pytest.mark.parametrize("name", ["A", "C", "late"])
def test_the_request_fails_with_plugin_and_hook_and_nobody_else_notices(
    hook, overlap, name, caplog
):
    plugin = fails_over(name, hook, PER_REQUEST[hook])
    engine = make_engine(overlap=overlap, seqs=3, plugins={"broken": plugin}, contains_faults=True)
    with caplog.at_level(logging.ERROR):
        out = run(engine, ARRIVALS)
    assert out.reason(name) == "error"
    text = (
        f"request '{name}' failed: ZeroDivisionError: told to fail;"
        f" raised by plugin broken at {hook}"
    )
    assert out.records[name].error == text
    assert text in caplog.text
    for other in {"A", "B", "C", "D", "late"} - {name}:
        assert out.reason(other) == "length"
        assert len(out.tokens(other)) == (4 if other == "late" else 12)
    check_alive(engine)


@HOOKS
def test_elsewhere_the_exception_reaches_the_caller(hook):
    plugin = fails_over("B", hook, PER_REQUEST[hook])
    with pytest.raises(ZeroDivisionError) as caught:
        run(make_engine(plugins={"broken": plugin}), ARRIVALS)
    assert caught.value.__notes__ == [f"raised by plugin broken at {hook}"]


@OVERLAP
def test_all_choices_of_a_request_fail_with_it(overlap):
    arrivals = [Arrival(0, "A", 40, 12, params={"n": 3}), Arrival(0, "B", 40, 4)]
    asked = 0

    def later(query):
        nonlocal asked
        if PER_REQUEST["decide_admission"](query) == "A":
            asked += 1
            if asked > 1:  # its first choice runs already
                raise ZeroDivisionError("told to fail")

    plugin = spy("decide_admission", later)
    engine = make_engine(overlap=overlap, seqs=2, plugins={"broken": plugin}, contains_faults=True)
    out = run(engine, arrivals)
    assert (out.reason("A"), out.reason("B")) == ("error", "length")
    assert {choice.finish_reason for choice in out.records["A"].choices} == {"error"}
    check_alive(engine)


def test_an_answer_that_breaks_a_rule_is_contained_too():
    wrong = AdmissionDecision("yes")
    plugin = spy("decide_admission", lambda q: wrong if q.step == 0 else None)
    out = run(make_engine(plugins={"broken": plugin}, contains_faults=True), ARRIVALS)
    assert {out.reason(name) for name in "ABCD"} == {"error"}
    assert "verdict must be a Verdict, got 'yes'" in out.records["A"].error
    assert out.reason("late") == "length"


def test_predictor_that_fails_fails_the_request():
    class Predictor:
        def predict(self, request):
            if request.request_id == "B":
                raise ZeroDivisionError("told to fail")
            return 5.0

        def observe(self, record):
            raise ValueError("nothing learnt")

    plugin = spy("build_length_predictor", lambda q: Predictor())
    engine = make_engine(plugins={"broken": plugin}, contains_faults=True)
    out = run(engine, ARRIVALS)
    assert [out.reason(name) for name in "ABCD"] == ["length", "error", "length", "length"]
    check_alive(engine)


def test_fault_after_the_end_is_only_logged(caplog):
    plugin = fails_over("A", "on_request_finished", lambda q: q.request.request_id)
    engine = make_engine(plugins={"broken": plugin}, contains_faults=True)
    with caplog.at_level(logging.ERROR):
        out = run(engine, ARRIVALS)
    assert out.reason("A") == "length"
    assert "raised by plugin broken at on_request_finished" in caplog.text
    check_alive(engine)


@pytest.mark.parametrize("hook", ["decide_order", "decide_batch", "decide_preemption", "on_step"])
def test_fault_that_concerns_everybody_is_not_contained(hook):
    def fail(query):
        raise ZeroDivisionError("told to fail")

    engine = make_engine(
        pages=8,
        admission=PromptFits(growth_share=0),
        plugins={"broken": spy(hook, fail)},
        contains_faults=True,
    )
    with pytest.raises(ZeroDivisionError, match="told to fail"):
        run(engine, [Arrival(0, name, 50, 40) for name in "AB"])


def test_displacement_stops_when_admission_fails_over_the_head():
    """Nobody else is preempted for a request that is to fail."""
    refused = False

    def admission(query):
        nonlocal refused
        if PER_REQUEST["decide_admission"](query) != "head":
            return None
        if refused:
            raise ZeroDivisionError("told to fail")
        refused = True
        return AdmissionDecision(Verdict.WAIT, "not yet")

    plugins = {
        "gate": spy("decide_admission", admission),
        "displacing": spy(
            "decide_preemption", lambda q: PreemptionDecision(q.candidates.id), displaces=True
        ),
    }
    engine = make_engine(plugins=plugins, contains_faults=True)
    out = run(engine, [Arrival(0, "A", 20, 30), Arrival(0, "B", 20, 30), Arrival(3, "head", 20, 3)])
    assert out.reason("head") == "error"
    assert out.preemptions() == 1
    assert (out.reason("A"), out.reason("B")) == ("length", "length")
