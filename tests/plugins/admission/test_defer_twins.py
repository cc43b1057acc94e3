"""defer_twins: a common prefix is computed once; nobody else notices."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.queries import CacheAdmissionDecision
from plugins.admission.defer_twins import DeferTwins
from plugins.allocator.contiguous import Contiguous
from plugins.batching.prefill_first import PrefillFirst
from plugins.cache.none import NoCache
from plugins.workload.shared_prefix import SharedPrefix
from tests.engine_harness import VOCAB, Arrival, finish, make_engine, run


def twins_engine(min_tokens: int = 32, **options):
    sizes = {"pages": 256, "seqs": 32, "budget": 256} | options
    return make_engine(plugins={"defer_twins": DeferTwins(min_tokens)}, **sizes)


def twins(num: int, prefix: int, own: int = 32, out: int = 4, **more) -> list[Arrival]:
    """`num` requests at once that begin with the same tokens."""
    return [Arrival(0, f"t{i}", prefix + own, out, ("base", prefix), **more) for i in range(num)]


def decisions(out):
    """Everything decided about requests and rows, by step; who decided it left out."""
    return [
        (e.record.rows, [(c.kind, c.request_id, c.reason, c.detail) for c in e.record.choices])
        for e in out.events
    ]


def admitted_step(out, name: str) -> int:
    """The only step in which a request was admitted."""
    (step,) = [
        event.record.step
        for event in out.events
        for choice in event.record.choices
        if (choice.kind, choice.request_id) == ("admitted", name)
    ]
    return step


def deferred(out) -> list[str]:
    """Who was skipped by the policy, once for each time."""
    return [c.request_id for c in out.choices("skipped") if c.plugin == "defer_twins"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batching", [None, PrefillFirst()])
def test_common_prefix_is_computed_once_and_steps_fall(overlap, batching):
    more = {"overlap": overlap} | ({"batching": batching} if batching else {})
    plain = run(make_engine(pages=2048, seqs=32, budget=256, **more), twins(32, 512))
    out = run(twins_engine(pages=2048, **more), twins(32, 512))
    assert plain.total("duplicate_prefill_tokens") > 10 * 512
    assert out.total("duplicate_prefill_tokens") == 0
    assert out.total("prefill_tokens") == 512 + 32 * 32
    assert len(out.events) < len(plain.events)
    assert [out.records[f"t{i}"].cached_tokens for i in range(32)] == [0] + [512] * 31


@pytest.mark.parametrize("overlap", [False, True])
def test_workload_of_several_groups_computes_each_prefix_once(overlap):
    load = SharedPrefix(num_groups=4, requests_per_group=8, prefix_tokens=256, suffix_tokens=20)
    engine = twins_engine(pages=2048, overlap=overlap)
    for request in load.requests(None, VOCAB, seed=0):
        engine.submit(request)
    events = finish(engine)
    assert sum(e.record.duplicate_prefill_tokens for e in events) == 0
    assert sum(record.cached_tokens for record in engine.records.values()) == (32 - 4) * 256


def test_others_pass_a_twin():
    """Admission goes on behind it: a stranger that came last starts in the first step."""
    out = run(twins_engine(), [*twins(3, 512), Arrival(0, "stranger", 40, 4)])
    assert admitted_step(out, "t0") == admitted_step(out, "stranger") == 0
    assert admitted_step(out, "t1") == admitted_step(out, "t2") == 3  # 544 tokens at 256 a step
    assert set(deferred(out)) == {"t1", "t2"}


def test_twin_starts_once_the_common_pages_are_cached_whatever_the_leader_still_computes():
    """Of the leader's 1,000 tokens 64 are common: one step of 128 publishes them."""
    arrivals = [Arrival(0, "long", 1000, 4, ("base", 64)), Arrival(0, "short", 80, 4, ("base", 64))]
    out = run(twins_engine(budget=128), arrivals)
    assert admitted_step(out, "short") == 1
    assert out.records["short"].cached_tokens == 64
    assert out.first_token_step("short") < out.first_token_step("long")


def test_prefix_that_is_cached_already_makes_nobody_wait():
    arrivals = [Arrival(0, "first", 544, 1, ("base", 512))]
    arrivals += [Arrival(20, f"later{i}", 544, 4, ("base", 512)) for i in range(3)]
    out = run(twins_engine(), arrivals)
    assert not deferred(out)
    assert [out.records[f"later{i}"].cached_tokens for i in range(3)] == [512] * 3


@pytest.mark.parametrize("overlap", [False, True])
def test_twin_starts_in_the_step_after_its_leader_was_aborted(overlap):
    out = run(twins_engine(budget=64, overlap=overlap), twins(2, 512), aborts={"t0": 2})
    assert out.reason("t0") == "abort"
    assert admitted_step(out, "t1") == 2
    assert out.records["t1"].cached_tokens == 128  # what two steps had published


@pytest.mark.parametrize("overlap", [False, True])
def test_random_prompts_are_decided_as_by_default(overlap):
    rng = np.random.default_rng(3)
    arrivals = [
        Arrival(
            int(rng.integers(0, 20)),
            f"r{i}",
            int(rng.integers(1, 300)),
            int(rng.integers(1, 40)),
            params={"n": int(rng.integers(1, 3))},
        )
        for i in range(30)
    ]
    options = {"pages": 48, "seqs": 8, "budget": 64, "overlap": overlap}
    plain, out = run(make_engine(**options), arrivals), run(twins_engine(**options), arrivals)
    assert plain.preemptions() > 0  # memory is tight enough for decisions to matter
    assert decisions(out) == decisions(plain)
    assert not deferred(out)


@pytest.mark.parametrize("overlap", [False, True])
def test_everyone_ends_when_twins_are_preempted(overlap):
    """A preempted leader waits itself, so nobody waits for it; the checks of run() do the rest."""
    rng = np.random.default_rng(8)
    arrivals = [
        Arrival(
            int(rng.integers(0, 12)),
            f"r{i}",
            int(rng.integers(100, 200)),
            int(rng.integers(1, 80)),
            (f"base{i % 3}", int(rng.integers(32, 200))),
            params={"n": int(rng.integers(1, 3))},
        )
        for i in range(24)
    ]
    out = run(twins_engine(pages=32, seqs=8, budget=48, overlap=overlap), arrivals)
    assert out.preemptions() > 0
    assert deferred(out)
    assert {record.finish_reason for record in out.records.values()} == {"length"}


def test_decisions_do_not_depend_on_overlap():
    arrivals = [*twins(12, 256), *(Arrival(i, f"r{i}", 50, 9) for i in range(6))]
    outs = [run(twins_engine(pages=96, overlap=on), arrivals) for on in (False, True)]
    steps = [{name: admitted_step(out, name) for name in out.records} for out in outs]
    assert deferred(outs[0]) == deferred(outs[1]) != []
    assert steps[0] == steps[1]


UNSHARED = {
    "another namespace": [{"fields": {"namespace": name}} for name in "ab"],
    "leader not cached": [{"fields": {"cache": False}}, {}],
    "twin not cached": [{}, {"fields": {"cache": False}}],
    "prompt logprobs": [{}, {"params": {"prompt_logprobs": 0}}],
}


@pytest.mark.parametrize("case", UNSHARED)
def test_nobody_waits_for_pages_that_could_not_be_shared(case):
    first, second = UNSHARED[case]
    arrivals = [
        Arrival(0, "a", 544, 4, ("base", 512), **first),
        Arrival(0, "b", 544, 4, ("base", 512), **second),
    ]
    out = run(twins_engine(), arrivals)
    assert admitted_step(out, "a") == admitted_step(out, "b") == 0


@pytest.mark.parametrize(("prefix", "waits"), [(47, False), (48, True), (63, True)])
def test_shorter_common_prefixes_than_min_tokens_are_not_worth_a_wait(prefix, waits):
    """Whole pages count: 47 tokens are two of 16."""
    out = run(twins_engine(min_tokens=48), twins(2, prefix, own=64))
    assert bool(deferred(out)) is waits


def test_equal_prompts_share_all_but_the_last_token():
    """A prompt of exactly two pages takes one from the cache, so there is one to wait for."""
    assert not deferred(run(twins_engine(min_tokens=32), twins(2, 32, own=0)))
    assert deferred(run(twins_engine(min_tokens=16), twins(2, 32, own=0))) == ["t1"]


class Refuse:
    @hookimpl
    def decide_cache_admission(self, query):
        return CacheAdmissionDecision(False, "mine alone")


@pytest.mark.parametrize(
    "options",
    [
        {"cache_admission": Refuse()},
        {"cache": NoCache()},
        {"cache": NoCache(), "allocator": Contiguous(16)},
    ],
    ids=["refused", "none", "contiguous"],
)
def test_pages_that_do_not_reach_the_cache_cost_one_step_of_waiting(options):
    out = run(twins_engine(budget=64, **options), twins(4, 512))
    assert [admitted_step(out, f"t{i}") for i in range(4)] == [0, 1, 1, 1]


def test_reason_names_the_leader_and_the_tokens():
    out = run(twins_engine(budget=64), twins(2, 256))
    reasons = [choice.reason for choice in out.choices("skipped", "t1")]
    assert reasons[:2] == [
        "'t0' computes the first 256 tokens, 0 are cached",
        "'t0' computes the first 256 tokens, 64 are cached",
    ]


def test_min_tokens_below_one_is_refused():
    with pytest.raises(ConfigError, match="min_tokens must be >= 1, got 0"):
        DeferTwins(min_tokens=0)
