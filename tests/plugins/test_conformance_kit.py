"""The policy conformance kit itself: it finds each of many mistakes, names hook and rule, and lets
right policies through."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from core.hooks import HOOK_NAMES
from tests.plugins import broken_policies as broken
from tests.plugins.conformance import caches, digest, objects, routers, rules, starvation
from tests.plugins.conformance.rules import BrokenRuleError, NotCheckedError, Runs
from tests.plugins.conformance.subject import KNOWN, OUTSIDE, load, subject_of
from tests.plugins.conformance.traffic import Traffic, ask, memory_pressure, mixed

ROOT = Path(__file__).resolve().parents[2]
CHILD = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
"""Of a child process: pytest must not take itself for one of several workers."""


def subject(target, **arguments):
    return subject_of(f"{broken.__file__}:{target.__name__}", target, arguments)


def two_long_prompts(seed):
    """One slot, prompts of seven steps that the cache must not keep."""
    asks = [ask(0, name, 100, 4, cache=False) for name in ("one", "other")]
    return Traffic("two long prompts", tuple(asks), seqs=1, budget=16)


def served(rule, one, traffic=mixed):
    rules.served(Runs(), one, traffic(0), rule)


def on_runs(rule, one, traffic=mixed):
    rule(Runs(), one, traffic(0))


def probed(probe, one):
    starvation.does_not_starve(one, probe)


def swallows(one):
    rules.lets_exceptions_pass(one, mixed(0), one.hooks[0])


def promises(one):
    one = replace(one, quick=False)
    caches.keeps_its_promises(one, one.hooks[0])


clock = partial(served, "clock and chance")
decisions = partial(served, "decisions")
short = partial(served, "decisions", traffic=memory_pressure)

MISTAKES = [
    (broken.LastComeFirst, partial(probed, starvation.QUEUE), "starvation: decide_order"),
    (broken.ReadsTheClock, clock, r"clock and chance: decide_order .*time\.time\(\) was called"),
    (broken.ReadsTheClockByName, clock, r"decide_order .*time\.perf_counter\(\) was called"),
    (broken.HidesTheClock, clock, r"decide_order .*time\.monotonic\(\) was called"),
    (broken.DrawsFromTheModule, clock, r"decide_preemption .*random\.shuffle\(\) was called"),
    (broken.DrawsUnseeded, clock, "decide_preemption .*default_rng.* without a seed"),
    (
        broken.DrawsFromAnObject,
        partial(on_runs, rules.deterministic),
        "determinism: decide_order .*first and second run",
    ),
    (
        broken.CountsInTheClass,
        partial(on_runs, rules.deterministic),
        "determinism: decide_order .*first and second run",
    ),
    (
        broken.RemembersInTheModule,
        partial(on_runs, rules.isolated),
        "isolation: decide_order .*keep no state in modules",
    ),
    (
        broken.CountsCommittedTokens,
        partial(on_runs, rules.overlap_safe, traffic=memory_pressure),
        "overlap: decide_preemption .*step .*count with `emitted`",
    ),
    (broken.ChangesTheTable, partial(served, "queries"), "decide_order .*waiting.arrival_s"),
    (broken.ChangesTheQuery, partial(served, "queries"), "decide_order .*its query: now_s"),
    (
        broken.ChangesAPrompt,
        partial(served, "queries"),
        "decide_cache_admission .*its query: request",
    ),
    (broken.NeverAdmits, decisions, "decisions: decide_admission .*nobody was admitted"),
    (broken.NamesTooFewVictims, short, "decisions: decide_preemption .*victims must free"),
    (broken.NamesStrangers, short, "decisions: decide_preemption .*ids of candidates"),
    (broken.AsksForNoTokens, decisions, r"decisions: decide_batch .*num_tokens must be in \[1"),
    (
        broken.DisplacesEquals,
        partial(served, "progress", traffic=two_long_prompts),
        "progress: decide_preemption .*not done",
    ),
    (
        broken.WalksASet,
        digest.same_in_every_process,
        "determinism: decide_order .*differ between processes",
    ),
    (broken.IsNotSteady, rules.joins_steps, "steady: decide_batch .*tokens differ"),
    (broken.Swallows, swallows, "exceptions: decide_admission .*swallowed"),
    (broken.Raises, partial(served, "exceptions"), "decide_batch .*ZeroDivisionError: a mistake"),
    (broken.RepeatsVictims, promises, "protocol: build_evictor .*not on offer"),
    (broken.GivesUpEarly, promises, "protocol: build_evictor .*nodes are on offer"),
    (broken.LooksAtAll, caches.operations, "operations: build_evictor .*logarithmic"),
    (broken.HoldsOnToNodes, caches.forgets_what_went, "build_evictor .*still referred to"),
    (
        broken.GivesPagesTwice,
        objects.allocator_keeps_its_promises,
        "protocol: build_allocator .*distinct free pages",
    ),
    (
        broken.PredictsNothing,
        objects.predictor_keeps_its_promises,
        "protocol: build_length_predictor .*finite",
    ),
    (
        broken.NegativeTimes,
        objects.step_time_keeps_its_promises,
        "protocol: build_step_time_model .*>= 0",
    ),
    (broken.RoutesToOne, routers.spreads_load, r"starvation: decide_route .*\[200, 0, 0, 0, 0\]"),
    (broken.RoutesToNobody, routers.keeps_its_contract, "decisions: .*must be one that is ready"),
    (
        broken.TakesTurnsInTheClass,
        routers.keeps_its_contract,
        "determinism: decide_route .*state in a class or module",
    ),
    (
        broken.RoutesByTheClock,
        routers.keeps_its_contract,
        r"clock and chance: .*time\.time\(\) was called",
    ),
    (broken.RoutesOnceMore, routers.lets_exceptions_pass, "exceptions: decide_route .*swallowed"),
]


@pytest.mark.parametrize(
    ("target", "check", "message"), MISTAKES, ids=[target.__name__ for target, *_ in MISTAKES]
)
def test_mistake_is_found(target, check, message):
    with pytest.raises(BrokenRuleError, match=message):
        check(subject(target))


def test_slow_evictor_is_right_all_the_same():
    promises(subject(broken.LooksAtAll))


def test_starving_by_design_is_reported():
    said = starvation.does_not_starve(subject(broken.LastComeFirstByDesign), starvation.QUEUE)
    assert said.endswith("by design: the latest goes first")


@pytest.mark.parametrize("patience_s", [0.5, 3600.0])
def test_stated_bound_is_given_time_and_then_counted(patience_s):
    kept = subject(broken.PatientLastComeFirst, patience_s=patience_s)
    starvation.does_not_starve(kept, starvation.QUEUE)
    not_kept = subject(broken.PatientLastComeFirst, patience_s=patience_s, kept=False)
    with pytest.raises(BrokenRuleError, match=f"after {patience_s:g} s of waiting"):
        starvation.does_not_starve(not_kept, starvation.QUEUE)


def test_rule_that_cannot_be_looked_at_is_skipped_not_passed():
    for rule in (rules.deterministic, rules.isolated, rules.overlap_safe):
        with pytest.raises(NotCheckedError, match="broke off: decisions"):
            on_runs(rule, subject(broken.NeverAdmits))


def test_every_hook_is_known_to_the_kit():
    known = {*KNOWN, *OUTSIDE}
    assert not set(HOOK_NAMES) - known, "give it checks and name it in KNOWN, or name it in OUTSIDE"
    assert not known - set(HOOK_NAMES)


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("plugins.order.fcfs", None, "must be module:Class"),
        ("plugins.order.nosuch:Fcfs", None, "No module named"),
        ("plugins.order.fcfs:Nosuch", None, "no attribute 'Nosuch'"),
        ("plugins.order.fcfs:hookimpl", None, "must name a class"),
        ("plugins.cache.lru:LruEvictor", None, "has on_extend, no hook"),
        ("plugins.admission.prompt_fits:PromptFits", '{"growth_share": 3}', "growth_share must be"),
        ("plugins.admission.prompt_fits:PromptFits", '{"shar": 3}', "shar is no key"),
        ("plugins.admission.prompt_fits:PromptFits", "[1]", "must be a JSON object"),
    ],
)
def test_policy_that_cannot_be_loaded_says_why(spec, arguments, message):
    with pytest.raises(Exception, match=message):
        load(spec, arguments)


def run_pytest(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += arguments
    return subprocess.run(command, cwd=ROOT, env=CHILD, capture_output=True, text=True, timeout=120)


def test_policy_that_cannot_be_loaded_is_one_usage_error():
    done = run_pytest("--policy", "plugins.nosuch:Mine")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: --policy plugins.nosuch:Mine: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout.strip()


def test_kit_takes_a_users_file_and_prints_the_table():
    spec = f"{Path(broken.__file__)}:PatientLastComeFirst"
    arguments = '{"patience_s": 2.0, "kept": false}'
    done = run_pytest(
        "--policy", spec, "--policy-args", arguments, "-k", "starves or (one_run and mixed)"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    table = done.stdout.partition("= conformance of ")[2]
    (line,) = (line for line in table.splitlines() if line.startswith("nobody starves"))
    assert line.split()[-2:] == ["0", "1"]
    assert "starvation: decide_order of " in table
    assert "after 2 s of waiting" in table
