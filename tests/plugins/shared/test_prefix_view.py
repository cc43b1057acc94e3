"""The router's view of prefix caches: by hand, and against sets."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.shared.prefix_view import PrefixView
from tests.plugins.router.route_tables import ask


def held(view, digests, *replicas):
    return view.cached_tokens(digests, replicas, 16).tolist()


def test_a_prompt_is_found_where_it_was_sent_up_to_its_last_whole_block():
    view = PrefixView(block_tokens=16)
    first = view.digests(ask(prompt=100), 16)
    assert len(first) == 6, "of 100 tokens 6 blocks of 16"
    assert held(view, first, "a", "b") == [0, 0]
    view.add("a", first)
    assert held(view, first, "a", "b") == [96, 0]
    longer = view.digests(ask(prompt=[*range(70), *range(500, 560)]), 16)
    assert held(view, longer, "a", "b") == [64, 0], "70 common tokens are 4 blocks"


def test_the_last_token_is_always_computed():
    view = PrefixView(block_tokens=16)
    view.add("a", view.digests(ask(prompt=96), 16))
    assert len(view.digests(ask(prompt=96), 16)) == 5
    assert held(view, view.digests(ask(prompt=97), 16), "a") == [80]


def test_blocks_are_whole_pages():
    assert len(PrefixView(block_tokens=64).digests(ask(prompt=300), 16)) == 4
    large = PrefixView(block_tokens=64)
    digests = large.digests(ask(prompt=300), 128)
    assert len(digests) == 2
    large.add("a", digests)
    assert large.cached_tokens(digests, ["a"], 128).tolist() == [256]


def test_tenants_share_nothing_and_uncached_requests_have_nothing():
    view = PrefixView(block_tokens=16)
    view.add("a", view.digests(ask(prompt=100, namespace="x"), 16))
    assert held(view, view.digests(ask(prompt=100, namespace="x"), 16), "a") == [96]
    assert held(view, view.digests(ask(prompt=100), 16), "a") == [0]
    assert view.digests(ask(prompt=100, cache=False), 16) == []


def test_a_pool_holds_so_much_and_the_least_recently_sent_goes_from_its_end():
    view = PrefixView(block_tokens=16)
    view.resize("a", 8 * 16, 16)
    first, second = list(range(1, 7)), list(range(11, 15))
    view.add("a", first)
    view.add("a", second)
    assert view.num_blocks("a") == 8
    assert held(view, first, "a") == [64], "2 of 6 blocks went, the last ones"
    assert held(view, second, "a") == [64]
    view.add("a", first[:4])  # used again: the second goes now
    view.add("a", [21, 22])
    assert held(view, first[:4], "a") == [64]
    assert held(view, second, "a") == [32]


def test_a_refused_prompt_is_forgotten_and_what_was_there_stays():
    view = PrefixView(block_tokens=16)
    view.add("a", [1, 2])
    new = view.add("a", [1, 2, 3])
    assert new == [3]
    view.forget("a", new)
    assert held(view, [1, 2, 3], "a") == [32]


def test_a_replica_that_is_gone_holds_nothing_and_its_name_may_come_back():
    view = PrefixView(block_tokens=16)
    view.add("a", [1, 2])
    view.add("b", [1])
    view.drop("a")
    assert held(view, [1, 2], "a", "b") == [0, 16]
    view.add("c", [5])
    assert held(view, [1, 2], "a", "b", "c") == [0, 16, 0]
    view.add("a", [1])
    assert held(view, [1, 2], "a", "b", "c") == [16, 16, 0]


def test_what_a_replica_tells_replaces_the_record():
    view = PrefixView(block_tokens=16)
    view.add("a", [1, 2, 3])
    view.replace("a", [1, 9])
    assert held(view, [1, 2, 3], "a") == [16]
    assert view.num_blocks("a") == 2


def test_view_agrees_with_sets_of_prefixes():
    """Random prompts over a small alphabet, to random replicas, with replicas that go."""
    random, view = np.random.default_rng(0), PrefixView(block_tokens=16)
    names, model = list("abcde"), {name: set() for name in "abcde"}
    for _ in range(400):
        blocks = [int(one) for one in random.integers(0, 3, random.integers(1, 6))]
        prompt = [*np.repeat(blocks, 16).tolist(), 7]
        paths = [tuple(blocks[: depth + 1]) for depth in range(len(blocks))]
        digests = view.digests(ask(prompt=prompt), 16)
        expected = [16 * sum(path in model[name] for path in paths) for name in names]
        assert held(view, digests, *names) == expected
        name = names[random.integers(5)]
        if random.random() < 0.1:
            view.drop(name)
            model[name].clear()
        else:
            view.add(name, digests)
            model[name] |= set(paths)


def test_bad_block_is_refused():
    with pytest.raises(ConfigError, match=r"router\.block_tokens must be >= 1, got 0"):
        PrefixView(block_tokens=0)
