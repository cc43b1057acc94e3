"""A policy in an engine: progress, conservation, determinism, isolation, overlap, starvation."""

import pytest

from tests.plugins.conformance import rules, starvation
from tests.plugins.conformance.cost import RUNNING, WAITING, costs
from tests.plugins.conformance.digest import same_in_every_process
from tests.plugins.conformance.traffic import KINDS


def test_one_run(runs, subject, traffic, rule, holds):
    """What rules.SERVED lists, each with its own outcome."""
    holds(rules.served, runs, subject, traffic, rule)


def test_same_seed_same_run(runs, subject, traffic, holds):
    holds(rules.deterministic, runs, subject, traffic)


@pytest.mark.thorough
def test_same_seed_same_run_in_every_process(subject, holds):
    holds(same_in_every_process, subject)


def test_a_second_engine_changes_nothing(runs, subject, traffic, holds):
    holds(rules.isolated, runs, subject, traffic)


def test_same_decisions_with_overlap(runs, subject, traffic, holds):
    holds(rules.overlap_safe, runs, subject, traffic)


@pytest.mark.thorough
def test_same_tokens_with_overlap(runs, subject, traffic, holds):
    holds(rules.same_tokens, runs, subject, traffic)


def test_exceptions_pass(subject, decision, traffic, holds):
    holds(rules.lets_exceptions_pass, subject, traffic, decision)


def test_joined_steps_tell_the_same(subject, steady, holds):
    holds(rules.joins_steps, subject)


def test_nobody_starves(subject, probe, holds):
    holds(starvation.does_not_starve, subject, probe)


@pytest.mark.thorough
def test_every_hook_was_asked(runs, subject, holds):
    """By some traffic; an answer of None alone leaves everything to the defaults."""
    holds(rules.was_asked, [runs.plain(subject, kind(0)) for kind in KINDS[:6]], subject)


@pytest.mark.thorough
@pytest.mark.parametrize("running", RUNNING)
def test_cost_of_a_call(subject, running, request):
    """Reported, never judged."""
    for one in costs(subject, running):
        row = (one.hook, running, WAITING, one.calls, float(one.mean_us), float(one.p99_us))
        request.node.user_properties.append(("cost", row))
