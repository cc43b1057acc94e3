"""Bounds of a prefix cache: worked out by hand, against exhaustive search, and on public traces."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.shared.cache_bounds import (
    CacheUse,
    belady_min_hits,
    cache_bounds,
    infinite_hits,
    lru_hits,
    prefix_trace,
    prompt_uses,
)


def use(text, asked=None, namespace=""):
    """A request whose pages are letters; the first `asked` may come from the cache."""
    keys = np.array([ord(letter) for letter in text], np.uint64)
    return CacheUse(keys, len(text) if asked is None else asked, namespace)


def test_hits_of_each_bound_are_those_worked_out_by_hand():
    bounds = cache_bounds([use("ab"), use("x"), use("ab"), use("y"), use("ac")], 2)
    assert bounds.pages_asked == 8
    assert bounds.infinite == 3  # ab, then a
    assert bounds.belady_min == 3  # x, y and c are never asked for again: bypassed
    assert bounds.oracle_admission_lru == 3
    assert bounds.lru == 2  # x pushes b out, y does again: only a is found, twice
    assert bounds.rate(bounds.infinite) == 3 / 8


def test_lru_evicts_the_deepest_page_of_the_oldest_path_first():
    trace = prefix_trace([use("ab"), use("x"), use("a"), use("ab")])
    assert lru_hits(trace, 2, [2, 1, 1, 2]) == 2  # x took the place of b, never of a


def test_min_keeps_the_nearer_next_use():
    # Two pages for a, b and c: b is needed last, so it goes when c comes.
    trace = prefix_trace([use("a"), use("b"), use("c"), use("a"), use("c"), use("b")])
    assert belady_min_hits(trace, 2) == 2
    assert belady_min_hits(trace, 3) == infinite_hits(trace) == 3


def test_losses_add_up_to_what_lru_lacks_of_the_infinite_cache():
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abc"), 4)) for _ in range(60)]
    bounds = cache_bounds(map(use, texts), 6)
    lost = bounds.lost_to_capacity + bounds.lost_to_admission + bounds.lost_to_eviction
    assert lost == pytest.approx(bounds.rate(bounds.infinite) - bounds.rate(bounds.lru))
    assert bounds.lost_to_capacity > 0
    assert bounds.lost_to_eviction > 0


def test_pages_beyond_those_asked_for_are_left_behind_but_never_found():
    answer = use("abcd", asked=2)  # a prompt of two pages, two more of output
    assert cache_bounds([answer, answer], 4).infinite == 2
    following = use("abcde", asked=5)
    assert cache_bounds([answer, following], 8).infinite == 4
    assert cache_bounds([answer, following], 8).belady_min == 4


def test_namespaces_share_nothing():
    assert cache_bounds([use("ab", namespace="s"), use("ab", namespace="t")], 9).infinite == 0


def test_equal_keys_behind_different_prefixes_are_different_pages():
    assert cache_bounds([use("ab"), use("xb")], 9).infinite == 0


def test_no_request_has_no_hits():
    bounds = cache_bounds([], 1)
    assert (bounds.pages_asked, bounds.infinite, bounds.rate(0)) == (0, 0, 0.0)


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="capacity must be >= 1 page, got 0"):
        cache_bounds([use("a")], 0)
    with pytest.raises(ConfigError, match="num_asked must be within its keys, got 2"):
        cache_bounds([use("a", asked=2)], 1)


def test_requests_ask_for_the_whole_pages_of_all_but_their_last_token():
    prompt = np.arange(8, dtype=np.int32)
    requests = [
        Request("a", prompt),
        Request("b", prompt, namespace="other"),
        Request("c", prompt, cache=False),
        Request("d", prompt, SamplingParams(prompt_logprobs=0)),
    ]
    uses = prompt_uses(requests, page_size=4)
    assert [(len(u.keys), u.num_asked, u.namespace) for u in uses] == [(2, 1, ""), (2, 1, "other")]
    outputs = {"a": np.arange(5, dtype=np.int32), "b": np.arange(4, dtype=np.int32)}
    uses = prompt_uses(requests, 4, outputs)
    assert [len(u.keys) for u in uses] == [3, 2]  # 8 + 4 and 8 + 3 tokens have KV


def exhaustive(uses, capacity):
    """Most pages that any choice of what to keep can find: all prefix-closed sets are tried."""
    trace = prefix_trace(uses)
    parents = {
        prefix: path[depth - 1] if depth else None
        for path in trace.paths
        for depth, prefix in enumerate(path)
    }

    def closed(kept):
        return all(parents[prefix] is None or parents[prefix] in kept for prefix in kept)

    @cache
    def best(index, kept):
        if index == len(trace.paths):
            return 0
        path, asked = trace.paths[index], trace.num_asked[index]
        hits = sum(prefix in kept for prefix in path[:asked])
        present = sorted(kept | set(path))
        options = [frozenset()]
        for prefix in present:
            options += [option | {prefix} for option in options if len(option) < capacity]
        return hits + max(best(index + 1, option) for option in options if closed(option))

    return best(0, frozenset())


TEXTS = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=3), st.integers(0, 3)), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=TEXTS, capacity=st.integers(1, 3))
def test_min_equals_exhaustive_search(texts, capacity):
    uses = [use(text, min(asked, len(text))) for text, asked in texts]
    assert belady_min_hits(prefix_trace(uses), capacity) == exhaustive(uses, capacity)
