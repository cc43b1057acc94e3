"""What the plugin registry refuses, counts and reports."""

import warnings

import numpy as np
import pytest

from core.errors import PluginError
from core.hooks import HOOK_NAMES, Hooks
from core.hookspecs import hookimpl
from core.queries import (
    AdmissionDecision,
    BatchDecision,
    CacheAdmissionDecision,
    OrderDecision,
    PreemptionDecision,
    Verdict,
)
from plugins.mode.run_facts import check_all_asked, usage_of_hooks
from plugins.order.fcfs import Fcfs
from plugins.preemption.evict_shortest import EvictShortest
from plugins.preemption.last_admitted import LastAdmitted
from tests.core.hook_spies import spied, spy
from tests.engine_harness import Arrival, finish, make_engine, run


class Misspelt:
    @hookimpl
    def decide_ordr(self, query): ...


class UnmarkedMisspelt:
    def on_stepp(self, query): ...


class Unmarked:
    @hookimpl
    def decide_order(self, query): ...

    def decide_batch(self, query): ...


class MarkedHelper:
    @hookimpl
    def score(self, query): ...


class NoHook:
    def helper(self): ...


class TwoArguments:
    @hookimpl
    def decide_order(self, query, extra): ...


class OtherName:
    @hookimpl
    def decide_order(self, question): ...


class NoArgument:
    @hookimpl
    def decide_order(self): ...


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (Misspelt(), r"plugin mine has decide_ordr, no hook; hooks are decide_order, "),
        (UnmarkedMisspelt(), r"plugin mine has on_stepp, no hook"),
        (Unmarked(), r"plugin mine has decide_batch without @hookimpl: it would never be called"),
        (MarkedHelper(), r"plugin mine has score, no hook"),
        (NoHook(), r"plugin mine \(NoHook\) implements no hook"),
        (TwoArguments(), r"mine.decide_order must take one argument named query, got \['query', "),
        (OtherName(), r"mine.decide_order must take one argument named query, got \['question'\]"),
        (NoArgument(), r"mine.decide_order must take one argument named query, got \[\]"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
@pytest.mark.parametrize("default", [False, True])
def test_malformed_plugin_is_refused(plugin, text, default):
    with pytest.raises(PluginError, match=text):
        Hooks({"mine": plugin}, {}) if default else Hooks({}, {"mine": plugin})


def test_two_configured_plugins_for_one_hook_are_refused_with_both_names():
    rivals = {"first": EvictShortest(), "second": LastAdmitted()}
    text = "decide_preemption has 2 configured plugins: first, second; name one"
    with pytest.raises(PluginError, match=text):
        Hooks({}, rivals)
    Hooks({"behind": LastAdmitted()}, {"first": EvictShortest()})
    Hooks(rivals, {})


def test_two_plugins_of_one_name_are_refused():
    with pytest.raises(PluginError, match="two plugins are named 'order'"):
        Hooks({"order": Fcfs()}, {"order": EvictShortest()})


def test_several_configured_plugins_may_observe_and_open_sinks():
    hooks = Hooks({}, {name: spy("on_step") for name in "ab"})
    hooks.notify("on_step", "event")
    assert [usage.asked for _, _, usage in usage_of_hooks(hooks)] == [1, 1]
    opened = Hooks({"a": spy("build_sink", lambda _: "A")}, {"b": spy("build_sink", lambda _: "B")})
    assert opened.build_all("build_sink", "query") == ["A", "B"]


def test_exception_carries_plugin_and_hook():
    def fail(query):
        raise ZeroDivisionError("a fault of the plugin")

    with pytest.raises(ZeroDivisionError, match="a fault of the plugin") as caught:
        spied(spy("decide_batch", fail), [Arrival(0, "A", 5, 2)])
    assert caught.value.__notes__ == ["raised by plugin spy at decide_batch"]


def test_build_without_an_answer_is_refused():
    with pytest.raises(PluginError, match="no plugin answers build_allocator"):
        make_engine(allocator=None)


def test_usage_counts_questions_and_answers():
    seen = spy("decide_order")
    engine = make_engine(plugins={"mine": seen})
    run(engine, [Arrival(0, "A", 5, 4), Arrival(2, "B", 5, 4)])
    counted = usage_of_hooks(engine.hooks)
    usage = {(hook, plugin): (u.asked, u.answered) for hook, plugin, u in counted}
    assert usage["decide_order", "mine"] == (2, 0)
    assert usage["decide_order", "order"] == (2, 2)
    assert usage["build_allocator", "allocator"] == (1, 1)
    assert usage["decide_preemption", "preemption"] == (0, 0)
    assert [hook for hook, _, _ in usage_of_hooks(engine.hooks)] == sorted(
        [hook for hook, _, _ in usage_of_hooks(engine.hooks)], key=HOOK_NAMES.index
    )


def test_none_falls_through_to_the_default_and_the_record_names_who_answered():
    sometimes = spy(
        "decide_batch",
        lambda q: (
            None if q.step % 2 else BatchDecision(q.running.id[:1], q.running.remaining[:1], "mine")
        ),
    )
    out = spied(sometimes, [Arrival(0, "A", 20, 5), Arrival(0, "B", 20, 5)])
    who = [event.record.batch_plugin for event in out.events]
    assert who[:4] == ["spy", "batching", "spy", "batching"]


def test_in_charge_names_the_plugin_asked_first():
    hooks = make_engine(plugins={"mine": spy("decide_order")}).hooks
    charge = hooks.in_charge()
    assert charge["decide_order"] == "mine"
    assert charge["decide_batch"] == "batching"
    assert not any(hook.startswith("on_") for hook in charge)


def test_configured_policy_that_was_never_asked_is_reported():
    engine = make_engine(plugins={"mine": EvictShortest()})
    run(engine, [Arrival(0, "A", 5, 4)])
    text = "plugin mine was never asked at decide_preemption in this run"
    with pytest.warns(UserWarning, match=text):
        check_all_asked(engine.hooks, strict=False)
    with pytest.raises(PluginError, match=text):
        check_all_asked(engine.hooks, strict=True)


def test_defaults_and_asked_policies_are_not_reported():
    engine = make_engine(pages=9, plugins={"mine": EvictShortest()})
    out = run(engine, [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)])
    assert out.preemptions() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_all_asked(engine.hooks, strict=True)


def test_displaces_is_a_property_of_plugins_that_decide_preemption():
    assert not make_engine().hooks.displaces
    assert not make_engine(plugins={"mine": spy("decide_order", displaces=True)}).hooks.displaces
    assert make_engine(plugins={"mine": spy("decide_preemption", displaces=True)}).hooks.displaces


def test_engine_works_with_every_decision_made_by_a_users_plugin():
    class Everything:
        @hookimpl
        def decide_order(self, query):
            return OrderDecision(query.waiting.arrival_s)

        @hookimpl
        def decide_admission(self, query):
            return AdmissionDecision(Verdict.ADMIT)

        @hookimpl
        def decide_batch(self, query):
            rows = np.cumsum(query.running.remaining) <= query.token_limit
            return BatchDecision(query.running.id[rows], query.running.remaining[rows])

        @hookimpl
        def decide_preemption(self, query):
            return PreemptionDecision(query.candidates.id[::-1])

        @hookimpl
        def decide_cache_admission(self, query):
            return CacheAdmissionDecision(admit=False)

    gone = dict.fromkeys(["order", "admission", "batching", "preemption", "cache_admission"])
    engine = make_engine(pages=8, plugins={"mine": Everything()}, **gone)
    for index in range(6):
        engine.submit(Arrival(0, f"r{index}", 20, 30).request())
    finish(engine)
    assert {record.finish_reason for record in engine.records.values()} == {"length"}
    assert {p for hook, p in engine.hooks.in_charge().items() if hook.startswith("decide")} == {
        "mine"
    }
