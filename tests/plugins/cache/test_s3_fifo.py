"""S3-FIFO over the real tree, at page size 1: prompt n of the first few holds page n."""

import pytest

from core.errors import ConfigError
from core.queries import EvictorQuery
from plugins.cache.s3_fifo import FEWEST_NAMES, S3Fifo


@pytest.fixture
def cache(harness):
    return harness(1, S3Fifo().build_evictor(EvictorQuery(1)))


def one_by_one(cache, count):
    return [cache.tree.evict(1).item() for _ in range(count)]


def test_what_was_hit_too_seldom_leaves_the_small_queue_in_order(cache):
    for token in (1, 2, 3):
        cache.store([token])
    cache.hit([2])
    assert one_by_one(cache, 3) == [1, 2, 3]


def test_two_hits_move_a_leaf_to_the_main_queue(cache):
    for token in (1, 2, 3):
        cache.store([token])
    cache.hit([1])
    cache.hit([1])
    assert one_by_one(cache, 3) == [2, 3, 1]


def test_what_comes_back_while_its_name_is_known_enters_the_main_queue(cache):
    for token in (1, 2, 3):
        cache.store([token])
    assert one_by_one(cache, 1) == [1]
    cache.store([1])  # page 4, main
    cache.store([5])  # page 5, small
    assert one_by_one(cache, 4) == [2, 3, 5, 4]


def test_main_queue_is_the_source_while_the_small_one_is_within_its_share(cache):
    for token in range(1, 10):
        cache.store([token])
        cache.hit([token])
        cache.hit([token])
    cache.store([10])
    # The nine that were hit move to main until the small queue holds one page of ten: within its
    # share, so main's oldest goes. Then it holds one of nine.
    assert one_by_one(cache, 3) == [1, 10, 2]


def test_a_hit_in_the_main_queue_is_worth_one_more_round(cache):
    for token in (1, 2):
        cache.store([token])
        cache.hit([token])
        cache.hit([token])
    cache.store([3])
    assert one_by_one(cache, 1) == [3]  # 1 and 2 are in main now, their hits are spent
    cache.hit([1])
    assert one_by_one(cache, 2) == [2, 1]


def test_a_node_keeps_its_place_while_it_is_locked_or_has_children(cache):
    cache.store([1])
    cache.store([2])
    handle = cache.lock([1])
    cache.store([1, 9])  # page 4
    assert one_by_one(cache, 1) == [2]
    cache.tree.unlock(handle)
    cache.store([3])  # page 5
    assert one_by_one(cache, 3) == [4, 1, 5]  # 1 is older than 3


def test_halves_of_a_split_node_keep_its_queue_and_place(cache):
    cache.store([1, 2])
    cache.store([3])  # page 3
    cache.hit([1])
    upper, lower = (node for node in cache.nodes() if node.first_key in (1, 2))
    assert upper.memo == lower.memo
    assert one_by_one(cache, 3) == [2, 1, 3]


def test_ghost_list_is_bounded(cache):
    for token in range(300):
        cache.store([token])
    cache.tree.clear()
    ghost = cache.evictor._ghost
    assert len(ghost) == FEWEST_NAMES
    assert cache.tree.num_pages == len(cache.evictor) == sum(cache.evictor._pages) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"small_share": 1.0}, r"small_share must be in \(0, 1\), got 1.0"),
        ({"promote_hits": 0}, "promote_hits must be >= 1, got 0"),
        ({"max_hits": 1}, "max_hits must be >= promote_hits = 2, got 1"),
    ],
)
def test_bad_values_are_named(arguments, text):
    with pytest.raises(ConfigError, match=text):
        S3Fifo(**arguments)
