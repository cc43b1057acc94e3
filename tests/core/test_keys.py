"""Page keys: equal pages have equal keys, different pages different ones."""

import numpy as np
import pytest

from core.keys import page_keys

KEY_OF_0_TO_15 = 3512434215902756362


def ids(rng, *shape, high=152_000):
    return rng.integers(0, high, shape, dtype=np.int32)


def test_keys_are_the_same_for_the_same_tokens_whoever_asks():
    tokens = ids(np.random.default_rng(0), 100)
    assert np.array_equal(page_keys(tokens, 16), page_keys(tokens.copy(), 16))
    fixed = page_keys(np.arange(16, dtype=np.int32), 16)
    assert fixed.dtype == np.uint64
    assert fixed.tolist() == [KEY_OF_0_TO_15], "keys may be kept beyond a run"


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_each_whole_page_has_a_key_of_its_own_tokens_and_a_tail_has_none(page_size):
    tokens = ids(np.random.default_rng(1), 5 * page_size + page_size // 2)
    keys = page_keys(tokens, page_size)
    assert len(keys) == 5
    for page in range(5):
        alone = page_keys(tokens[page * page_size : (page + 1) * page_size], page_size)
        assert alone[0] == keys[page]


def test_no_whole_page_gives_no_key():
    assert len(page_keys(np.ones(15, np.int32), 16)) == 0
    assert len(page_keys(np.ones(0, np.int32), 1)) == 0


def test_page_size_1_keys_are_the_token_ids():
    tokens = np.array([0, 7, 2**31 - 1], np.int32)
    assert page_keys(tokens, 1).tolist() == tokens.tolist()


@pytest.mark.parametrize(("page_size", "num_pages"), [(2, 2**20), (16, 2**18)])
def test_random_pages_have_different_keys(page_size, num_pages):
    """X10. The chance that 2**20 random 64-bit keys collide at all is 3e-8."""
    tokens = ids(np.random.default_rng(2), num_pages * page_size)
    keys = page_keys(tokens, page_size)
    # Random pages of 16 tokens are all different; of 2, some are equal and must have equal keys.
    distinct = num_pages if page_size == 16 else len(np.unique(tokens.view(np.int64)))
    assert len(np.unique(keys)) == distinct


def test_crafted_neighbours_have_different_keys():
    """X10: token j +31 and token j+1 -1, which a polynomial hash of base 31 cannot tell apart."""
    rng = np.random.default_rng(3)
    base = ids(rng, 20_000, 16, high=100_000) + 100
    places = rng.integers(0, 15, len(base))
    rows = np.arange(len(base))
    crafted = base.copy()
    crafted[rows, places] += 31
    crafted[rows, places + 1] -= 1
    assert not (page_keys(base.ravel(), 16) == page_keys(crafted.ravel(), 16)).any()


def test_order_of_tokens_matters():
    rng = np.random.default_rng(4)
    base = ids(rng, 20_000, 16)
    rolled = np.roll(base, 1, axis=1)
    differ = (base != rolled).any(axis=1)
    same_key = page_keys(base.ravel(), 16) == page_keys(rolled.ravel(), 16)
    assert not same_key[differ].any()


def test_single_token_changes_spread_over_all_bits():
    base = np.tile(np.arange(16, dtype=np.int32), (4096, 1))
    base[:, 7] = np.arange(4096)
    keys = page_keys(base.ravel(), 16)
    bits = (keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    share = bits.mean(axis=0)
    assert share.min() > 0.45
    assert share.max() < 0.55
