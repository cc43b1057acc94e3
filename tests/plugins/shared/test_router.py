"""The router: choosing and counting are one, answers are checked, nobody ready is an error."""

import numpy as np
import pytest

from core.errors import ConfigError, PolicyError
from core.hookspecs import hookimpl
from plugins.router.kv_headroom import KvHeadroom
from plugins.router.least_loaded import LeastLoaded
from plugins.shared.router import NoReplicaError, RouterSettings
from plugins.shared.routing import RouteDecision
from tests.core.hook_spies import spy
from tests.plugins.router.route_tables import Rig, ask, snapshot


class Answers:
    """Always the same answer."""

    def __init__(self, replica, scores=None):
        self.answer = RouteDecision(replica, scores, "as told")

    @hookimpl
    def decide_route(self, query):
        return self.answer


def test_a_request_is_counted_with_the_choice_and_given_back_once():
    rig = Rig(KvHeadroom(), [snapshot("a"), snapshot("b")])
    ticket = rig.router.route(ask(prompt=100), 28.0, 0.0)
    assert (ticket.replica, ticket.number, ticket.pages, ticket.prompt_tokens) == ("a", 1, 8, 100)
    assert rig.open() == {"a": 1, "b": 0}
    second = rig.router.route(ask("s", prompt=range(500, 600)), 28.0, 0.0)
    assert second.replica == "b", "a has promised 8 pages"
    assert rig.router.ended(ticket)
    assert not rig.router.ended(ticket)
    assert rig.open() == {"a": 0, "b": 1}


def test_cached_tokens_cost_no_pages_and_go_into_the_record():
    rig = Rig(LeastLoaded(), [snapshot("a")])
    rig.router.route(ask("r1", prompt=100), 28.0, 0.0)
    ticket = rig.router.route(ask("r2", prompt=100), 28.0, 1.5)
    assert (ticket.pages, ticket.prompt_tokens, ticket.cached_tokens) == (2, 4, 96)
    record = rig.records[1]
    assert (record.replica, record.cached_tokens, record.time_s) == ("a", 96, 1.5)
    assert (record.plugin, record.scores, record.age_s) == ("router", {"a": 1.0}, 1.5)


def test_aborts_and_refusals_leave_no_trace():
    """R12: 100 of each, then all counters are 0; what was refused is not thought cached."""
    rig = Rig(LeastLoaded(), [snapshot("a"), snapshot("b")])
    for number in range(100):
        first = rig.router.route(ask(f"a{number}", prompt=range(number, number + 40)), 16.0, 0.0)
        other = rig.router.route(ask(f"b{number}", prompt=range(900, 960)), 16.0, 0.0)
        assert rig.router.ended(first)
        assert rig.router.refused(other)
    assert rig.open() == {"a": 0, "b": 0}
    digests = rig.view.digests(ask(prompt=range(900, 960)), 16)
    assert rig.view.cached_tokens(digests, ["a", "b"], 16).tolist() == [0, 0]
    assert not rig.router._new
    assert not rig.router._coming


def test_all_dead_is_an_error_until_one_is_back():
    """R01."""
    rig = Rig(LeastLoaded(), [snapshot("a"), snapshot("b")])
    tickets = [rig.router.route(ask(f"r{i}"), 16.0, 0.0) for i in range(4)]
    undone = [
        ticket
        for name in "ab"
        for ticket in rig.router.fail(rig.incarnations[name], name, "killed")
    ]
    assert sorted(ticket.request_id for ticket in undone) == ["r0", "r1", "r2", "r3"]
    for number in range(100):
        with pytest.raises(NoReplicaError, match="no replica is ready"):
            rig.router.route(ask(f"s{number}"), 16.0, 0.1)
    rig.join(snapshot("a"), 1.0)
    again = rig.router.route(ask("t"), 16.0, 1.0)
    assert (again.replica, again.cached_tokens) == ("a", 0), "its cache died with it"
    assert all(rig.router.ended(ticket) for ticket in tickets)
    assert rig.open() == {"a": 1, "b": 0}


def test_a_new_incarnation_begins_with_an_empty_cache_however_the_last_one_went():
    rig = Rig(LeastLoaded(), [snapshot("a")], suspect_after_s=1.0, dead_after_s=2.0)
    old = rig.router.route(ask(prompt=100), 16.0, 0.0)
    assert rig.registry.expire(3.0) == [old]
    rig.join(snapshot("a"), 3.0)
    new = rig.router.route(ask("s", prompt=100), 16.0, 3.0)
    assert new.cached_tokens == 0
    assert rig.router.refused(old), "it takes nothing from the view of the new one"
    assert rig.router.route(ask("t", prompt=100), 16.0, 3.0).cached_tokens == 96


def test_excluded_replicas_are_not_asked_about():
    rig = Rig(LeastLoaded(), [snapshot("a"), snapshot("b")])
    assert rig.router.route(ask(), 16.0, 0.0, excluded={"a"}).replica == "b"
    with pytest.raises(NoReplicaError):
        rig.router.route(ask(), 16.0, 0.0, excluded={"a", "b"})


def test_an_unknown_or_draining_replica_is_refused_by_name_and_not_counted():
    rig = Rig(Answers("b"), [snapshot("a"), snapshot("b")])
    rig.router.route(ask(), 16.0, 0.0)
    rig.registry.drain("b")
    text = r"decide_route of router: replica must be one that is ready \(a\), got 'b'"
    with pytest.raises(PolicyError, match=text):
        rig.router.route(ask(), 16.0, 0.0)
    assert rig.open() == {"a": 0, "b": 1}


@pytest.mark.parametrize("scores", [[1.0], [1.0, np.nan], [1.0, 2.0, 3.0]])
def test_scores_are_one_finite_number_for_each(scores):
    rig = Rig(Answers("a", np.array(scores)), [snapshot("a"), snapshot("b")])
    text = "decide_route of router: scores must hold one finite number for each of 2 replicas"
    with pytest.raises(PolicyError, match=text):
        rig.router.route(ask(), 16.0, 0.0)


def test_policies_do_not_see_true_lengths():
    seen = spy("decide_route", lambda query: RouteDecision("a"))
    rig = Rig(seen, [snapshot("a")])
    rig.router.route(ask(forced_output=7), 16.0, 0.0)
    (query,) = seen.asked
    assert query.request.forced_output is None
    text = r"earliest_starts\(\) must be asked in mode=simulate by .*`oracle`, got router"
    with pytest.raises(PolicyError, match=text):
        query.earliest_starts()


def test_a_report_of_the_cache_is_believed():
    rig = Rig(LeastLoaded(), [snapshot("a")])
    digests = rig.view.digests(ask(prompt=100), 16)
    rig.report(snapshot("a", 2, cache=np.array(digests[:3], np.uint64)))
    assert rig.router.route(ask(prompt=100), 16.0, 0.0).cached_tokens == 48


def computed(seen):
    query = seen.asked[-1]
    return query.cached_tokens().tolist(), query.computed_tokens().tolist()


def test_what_an_open_request_brought_is_computed_once_it_has_ended():
    """A prompt of 100 tokens, another that begins with it, and 96 of 200 are in whole pages."""
    seen = spy("decide_route", lambda query: RouteDecision("a"))
    rig = Rig(seen, [snapshot("a"), snapshot("b")])
    first = rig.router.route(ask("r", prompt=100), 16.0, 0.0)
    second = rig.router.route(ask("s", prompt=200), 16.0, 0.0)
    assert computed(seen) == ([96, 0], [0, 0])
    rig.router.route(ask("t", prompt=200), 16.0, 0.0)
    assert computed(seen) == ([192, 0], [0, 0])
    assert rig.router.ended(first)
    third = rig.router.route(ask("u", prompt=200), 16.0, 0.0)
    assert computed(seen) == ([192, 0], [96, 0])
    assert rig.router.ended(second)
    assert rig.router.refused(third)
    rig.router.route(ask("v", prompt=200), 16.0, 0.0)
    assert computed(seen) == ([192, 0], [192, 0])


def test_what_is_more_than_the_prefill_left_is_computed():
    """192 tokens sent, and by the report 50 of all prompts there are still to be computed."""
    seen = spy("decide_route", lambda query: RouteDecision("a"))
    rig = Rig(seen, [snapshot("a")])
    rig.router.route(ask("r", prompt=200), 16.0, 0.0)
    rig.report(snapshot("a", 2, received=1, prompt_tokens=50))
    rig.router.route(ask("s", prompt=200), 16.0, 0.0)
    assert computed(seen) == ([192], [142])
    rig.report(snapshot("a", 3, received=2))
    rig.router.route(ask("t", prompt=200), 16.0, 0.0)
    assert computed(seen) == ([192], [192])


def test_a_report_of_the_cache_tells_what_is_computed():
    seen = spy("decide_route", lambda query: RouteDecision("a"))
    rig = Rig(seen, [snapshot("a")])
    rig.router.route(ask("r", prompt=100), 16.0, 0.0)
    digests = rig.view.digests(ask(prompt=100), 16)
    told = {"received": 1, "prompt_tokens": 200, "cache": np.array(digests[:3], np.uint64)}
    rig.report(snapshot("a", 2, **told))
    rig.router.route(ask("s", prompt=100), 16.0, 0.0)
    assert computed(seen) == ([48], [48])


def test_an_end_in_a_dead_incarnation_computes_nothing_in_the_next():
    seen = spy("decide_route", lambda query: RouteDecision("a"))
    rig = Rig(seen, [snapshot("a")])
    old = rig.router.route(ask("r", prompt=100), 16.0, 0.0)
    rig.router.fail(rig.incarnations["a"], "a", "killed")
    rig.join(snapshot("a"), 1.0)
    new = rig.router.route(ask("r", prompt=100), 16.0, 1.0)
    assert rig.router.ended(old)
    rig.router.route(ask("s", prompt=100), 16.0, 1.0)
    assert computed(seen) == ([96], [0])
    assert rig.router.ended(new)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match=r"router\.snapshot_interval_s must be > 0, got 0"):
        RouterSettings(snapshot_interval_s=0)
    with pytest.raises(ConfigError, match=r"router\.snapshot_delay_s must be >= 0, got -1"):
        RouterSettings(snapshot_delay_s=-1)
    with pytest.raises(ConfigError, match=r"router\.block_tokens must be >= 1"):
        RouterSettings(block_tokens=0)


def test_an_answer_that_is_no_decision_is_refused_by_name():
    class Says:
        @hookimpl
        def decide_route(self, query):
            return "a"

    rig = Rig(Says(), [snapshot("a")])
    text = r"decide_route of router: the answer must be a RouteDecision, got 'a'"
    with pytest.raises(PolicyError, match=text):
        rig.router.route(ask(), 16.0, 0.0)
