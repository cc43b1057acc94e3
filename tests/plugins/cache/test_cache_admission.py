"""What enters the cache: second hit and minimum length."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import CacheAdmissionQuery
from core.request import Request
from plugins.cache.min_length import MinLength
from plugins.cache.second_hit import SecondHit
from plugins.shared.path_digest import namespace_digest, path_digests
from tests.engine_harness import Arrival, make_engine, run


def asked(plugin, prompt, namespace="", num_tokens=None):
    request = Request("r", np.array(prompt, np.int32), namespace=namespace)
    known = len(prompt) if num_tokens is None else num_tokens
    decision = plugin.decide_cache_admission(CacheAdmissionQuery(request, known, 0, 0.0))
    return decision.admit, decision.num_tokens


def test_first_sighting_stays_out_and_the_second_enters_in_whole_blocks():
    plugin = SecondHit(block_tokens=4)
    prompt = list(range(10))
    assert asked(plugin, prompt) == (False, 0)
    assert asked(plugin, prompt) == (True, 8)


def test_only_the_common_part_of_two_prompts_enters():
    plugin = SecondHit(block_tokens=2)
    assert asked(plugin, [1, 2, 3, 4, 5, 6]) == (False, 0)
    assert asked(plugin, [1, 2, 3, 9, 5, 6]) == (True, 2)
    assert asked(plugin, [1, 2, 3, 9, 5, 6, 7, 8]) == (True, 6)


def test_the_same_block_behind_another_prefix_was_not_seen():
    plugin = SecondHit(block_tokens=1)
    asked(plugin, [1, 2])
    assert asked(plugin, [2, 2]) == (False, 0)
    assert asked(plugin, [2]) == (True, 1)


def test_sightings_in_another_namespace_do_not_count():
    plugin = SecondHit(block_tokens=1)
    asked(plugin, [1, 2], namespace="a")
    assert asked(plugin, [1, 2], namespace="b") == (False, 0)
    assert asked(plugin, [1, 2], namespace="a") == (True, 2)


def test_prompt_shorter_than_a_block_stays_out():
    plugin = SecondHit(block_tokens=16)
    assert [asked(plugin, [1, 2]) for _ in range(2)] == [(False, 0)] * 2


def test_newer_digests_take_the_places_of_older_ones():
    plugin = SecondHit(block_tokens=1, num_entries=4)
    for token in range(100):
        asked(plugin, [token])
    seen = [asked(plugin, [token])[0] for token in range(100)]
    assert not any(seen[:50])  # whatever stood for them was overwritten long since
    assert plugin._ghost.nbytes == 32


def test_a_prefix_counts_though_shorter_ones_were_overwritten():
    plugin = SecondHit(block_tokens=1, num_entries=64)
    asked(plugin, [1, 2, 3, 4, 5, 6])
    places = np.flatnonzero(plugin._ghost)
    known = plugin._ghost[places]
    assert len(places) == 6
    last = path_digests(np.arange(1, 7, dtype=np.uint64), before=namespace_digest(""))[-1]
    plugin._ghost[places[known != last]] = 0
    assert asked(plugin, [1, 2, 3, 4, 5, 6, 7]) == (True, 6)


def test_minimum_length_counts_all_known_tokens():
    plugin = MinLength(min_tokens=4)
    assert asked(plugin, [1, 2, 3]) == (False, None)
    assert asked(plugin, [1, 2, 3, 4]) == (True, None)
    assert asked(plugin, [1, 2, 3], num_tokens=4) == (True, None)


@pytest.mark.parametrize(
    ("plugin", "arguments", "text"),
    [
        (SecondHit, {"block_tokens": 0}, "block_tokens must be >= 1, got 0"),
        (SecondHit, {"num_entries": 12}, "num_entries must be a power of two, got 12"),
        (SecondHit, {"num_entries": 0}, "num_entries must be a power of two, got 0"),
        (MinLength, {"min_tokens": 0}, "min_tokens must be >= 1, got 0"),
    ],
)
def test_bad_values_are_named(plugin, arguments, text):
    with pytest.raises(ConfigError, match=text):
        plugin(**arguments)


def cached_tokens(admission):
    """Three times the same 64-token prompt, one after the other: what each finds in the cache."""
    arrivals = [
        Arrival(step, name, 64, 2, shares=("a", 64))
        for step, name in ((0, "a"), (10, "b"), (20, "c"))
    ]
    done = run(make_engine(cache_admission=admission), arrivals)
    return [done.records[name].cached_tokens for name in "abc"]


def test_in_an_engine_the_third_request_finds_what_the_second_was_let_in_with():
    # All but the last token may come from the cache, in pages of 16.
    assert cached_tokens(SecondHit(block_tokens=16)) == [0, 0, 48]
    assert cached_tokens(MinLength(min_tokens=64)) == [0, 48, 48]
    assert cached_tokens(MinLength(min_tokens=65)) == [0, 0, 0]
