"""Steps with equal slices of prompts may go in one too: also the cache's books are the same."""

import numpy as np
import pytest

from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.batching.chunked import Chunked
from plugins.cache.fifo import Fifo
from plugins.cache.gdsf import Gdsf
from plugins.cache.lfu import Lfu
from plugins.cache.lru import Lru
from plugins.cache.min_length import MinLength
from plugins.cache.none import NoCache
from plugins.cache.s3_fifo import S3Fifo
from plugins.cache.second_hit import SecondHit
from plugins.cache.slru import Slru
from plugins.cache.workload_aware import WorkloadAware
from plugins.executor.simulated import Simulated
from tests.core.test_joined_steps import OVERLAP, TIMES, play, told
from tests.core.test_joined_steps import make as made


def make(plugins=None, **settings):
    """An engine whose host has time enough: no step waits for it."""
    executor = Simulated(TIMES, vocab_size=500, host_s=0.0003, graph_sizes=[2, 4, 8])
    return made(plugins, executor=executor, **settings)


EVICTORS = [Lru, Fifo, Lfu, Slru, Gdsf, S3Fifo, WorkloadAware]


def prompts(seed=0, num=40, gap_s=0.2, kinds=6, **facts):
    """Prompts of many slices; half of them go on from one of a few texts, one in eight is one of
    these, so that twins run beside each other, and what is evicted comes again."""
    rng = np.random.default_rng(seed)
    texts = [
        rng.integers(1, 500, int(rng.integers(100, 300))).astype(np.int32) for _ in range(kinds)
    ]
    now_s, requests = 0.0, []
    for number in range(num):
        now_s += rng.exponential(gap_s)
        own = rng.integers(1, 500, int(rng.integers(5, 300))).astype(np.int32)
        text = texts[int(rng.integers(kinds))]
        prompt = [own, np.concatenate([text, own]), own, text][int(rng.integers(4))]
        prompt = np.concatenate([text, own]) if number % 4 == 0 else prompt
        params = SamplingParams(max_tokens=60)
        length = int(rng.integers(1, 50))
        facts["arrival_s"], facts["forced_output"] = now_s, length
        requests.append(Request(f"r{number}", prompt, params, **facts))
    return requests


def books(engine):
    """Every node of the tree: where it is, and what evictors know of it."""
    tree, found = engine.state.memory.cache, []

    def walk(node, path):
        for key, child in sorted(node.children.items()):
            facts = child.num_pages, child.created, child.last_used, child.hits, child.memo
            found.append(((*path, key), *facts))
            walk(child, (*path, key))

    for _, root in sorted(tree._roots.items()):
        walk(root, ())
    return found, tree._accesses, tree.num_pages, tree.num_evictable


def cached(engine):
    return {name: (r.cached_tokens, r.recomputed_tokens) for name, r in engine.records.items()}


def assert_same(make_one, requests, books_too=True):
    """Returns the joined run's records of steps with slices."""
    runs = []
    for joins in (False, True):
        engine = make_one()
        events = play(engine, requests, joins)
        sums = [
            sum(getattr(event.record, name) for event in events)
            for name in ("pages_evicted", "duplicate_prefill_tokens", "recomputed_tokens")
        ]
        facts = told(engine, events), cached(engine), sums, books(engine) if books_too else None
        runs.append((facts, events))
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        assert one == other
    return [e.record for e in runs[1][1] if e.record.prefill_tokens]


def joined(records):
    return sum(record.steps > 1 for record in records)


@OVERLAP
@pytest.mark.parametrize("evictor", EVICTORS)
def test_slices_in_one_are_the_same_slices_for_every_evictor(evictor, overlap):
    def one():
        return make(pages=90, evictor=evictor(), overlap=overlap)

    records = assert_same(one, prompts(num=60))
    assert joined(records) > 10
    assert sum(record.pages_evicted for record in records) > 100


@OVERLAP
@pytest.mark.parametrize("slice_tokens", [8, 24, 32])
def test_pages_and_slices_need_not_fit(slice_tokens, overlap):
    def one():
        return make(pages=120, batching=Chunked(slice_tokens=slice_tokens), overlap=overlap)

    assert joined(assert_same(one, prompts())) > 10


@pytest.mark.parametrize("gap_s", [0.2, 1.0])
@pytest.mark.parametrize("keeps", [lambda: SecondHit(16), lambda: MinLength(150)])
def test_what_the_cache_keeps_is_the_same(keeps, gap_s):
    """With gaps steps go on past the end of a prompt, whose length is what the cache is asked
    about."""

    def one():
        return make({"keeps": keeps()}, pages=120)

    assert joined(assert_same(one, prompts(gap_s=gap_s))) > 10


def test_without_a_cache():
    def one():
        return make(pages=120, cache=NoCache())

    assert joined(assert_same(one, prompts(), books_too=False)) > 10


@OVERLAP
def test_twins_that_run_side_by_side(overlap):
    def one():
        return make(pages=200, overlap=overlap)

    records = assert_same(one, prompts(kinds=1, gap_s=0.02))
    assert sum(record.duplicate_prefill_tokens for record in records) > 100
    assert joined(records) > 2


@OVERLAP
def test_under_memory_pressure(overlap):
    def one():
        return make(pages=48, admission=PromptFits(growth_share=0), overlap=overlap)

    records = assert_same(one, prompts(num=60))
    assert sum(record.recomputed_tokens for record in records) > 0
    assert joined(records) > 10


@OVERLAP
def test_who_ends_beside_slices_does_so_in_the_last_of_them(overlap):
    def one():
        return make(pages=120, batching=Chunked(slice_tokens=8), overlap=overlap)

    records = assert_same(one, prompts())
    beside = [record for record in records if 1 < record.steps == record.slices]
    assert sum(c.kind == "finished" for record in beside for c in record.choices) > 3
