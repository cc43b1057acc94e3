"""Public failures of other prefix caches, replayed on the tree. Names as in the case list."""

import numpy as np
import pytest


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 32000, length).astype(np.int32)


def weak_keys(tokens, page_size):
    """Polynomial hash with base 31: token j + 1 and token j - 31 cancel out."""
    powers = 31 ** np.arange(page_size - 1, -1, -1, dtype=np.uint64)
    pages = tokens.astype(np.uint64).reshape(-1, page_size)
    return (pages * powers).sum(axis=1, dtype=np.uint64)


def few_keys(tokens, page_size):
    """A digest of 6 bits."""
    return (tokens.reshape(-1, page_size).sum(axis=1) % 64).astype(np.uint64)


def test_eviction_spares_pages_of_a_live_sequence_k03(harness):
    # Avarok-Cybersecurity/atlas#373
    cache = harness(16)
    running, *_, pages = cache.insert(prompt(0, 64))
    cache.store(prompt(1, 64))
    dropped = cache.tree.evict(10**6)
    assert len(dropped) == 4
    assert set(dropped).isdisjoint(pages)
    assert cache.match(prompt(0, 64)).pages.tolist() == pages.tolist()
    cache.tree.unlock(running)
    assert sorted(cache.tree.evict(10**6)) == pages.tolist()


def test_split_under_a_lock_keeps_the_counts_k06(harness):
    # UbiquitousLearning/mllm#656
    cache = harness(4)
    first = prompt(0, 48)
    second = np.concatenate([first[:20], prompt(1, 28)])
    cache.store(first)
    locked = cache.lock(first)
    other, num_existing, num_stored, _ = cache.insert(second)
    assert (num_existing, num_stored) == (5, 12)
    assert cache.tree.num_evictable == 0
    cache.tree.unlock(locked)
    cache.tree.check()
    assert (cache.tree.num_pages, cache.tree.num_evictable) == (19, 7)
    cache.tree.unlock(other)
    cache.tree.check()
    assert (cache.tree.num_pages, cache.tree.num_evictable) == (19, 19)


def test_each_turn_reuses_all_pages_of_the_former_x03(harness):
    # syv-ai/qwen38-27b-rtx3090#102, jundot/omlx#2876
    cache = harness(16)
    conversation = prompt(0, 96)
    cached = []
    for length in (64, 80, 96):
        cached.append(cache.hit(conversation[:length]))
        cache.store(conversation[:length])
    assert cached == [0, 64, 80]


def test_matched_node_itself_is_locked_x06(harness):
    # sgl-project/mini-sglang#52
    cache = harness(16)
    cache.store(prompt(0, 48))
    handle = cache.lock(prompt(0, 48))
    assert len(cache.tree.evict(10**6)) == 0
    assert len(cache.match(prompt(0, 48)).pages) == 3
    cache.tree.unlock(handle)
    assert len(cache.tree.evict(10**6)) == 3
    assert len(cache.match(prompt(0, 48)).pages) == 0


def test_hit_refreshes_a_hot_prompt_x08(harness):
    # antonellof/ferrox#14: room for 4 prompts, the hot one used every second time
    cache = harness(16)
    room = 4 * 4
    hits = []
    for cold in range(1, 11):
        for seed in (0, cold):
            hit = cache.hit(prompt(seed, 64))
            if seed == 0:
                hits.append(hit)
            cache.tree.evict(4 - hit // 16 - (room - cache.tree.num_pages))
            cache.store(prompt(seed, 64))
            assert cache.tree.num_pages <= room
    assert hits == [0] + [64] * 9
    assert cache.hit(prompt(0, 64)) == 64
    assert cache.hit(prompt(1, 64)) == 0


def test_crafted_key_collision_is_no_hit_x10(harness):
    # vllm-project/vllm#12621, NVIDIA/Megatron-LM#4158
    cache = harness(16, key_of=weak_keys)
    honest = prompt(0, 64)
    crafted = honest.copy()
    crafted[20] += 1
    crafted[21] -= 31
    assert np.array_equal(weak_keys(honest, 16), weak_keys(crafted, 16))
    cache.store(honest)
    assert len(cache.match(crafted).pages) == 1
    assert len(cache.match(honest).pages) == 4


@pytest.mark.parametrize("page", [0, 1, 3])
def test_insert_stores_nothing_from_a_collision_on(harness, page):
    cache = harness(16, key_of=weak_keys)
    honest = prompt(0, 64)
    crafted = honest.copy()
    crafted[page * 16 + 4] += 1
    crafted[page * 16 + 5] -= 31
    stored = cache.store(honest)
    handle, num_existing, num_stored, _ = cache.insert(crafted)
    assert (num_existing, num_stored, handle.num_pages) == (page, page, page)
    assert cache.tree.num_evictable == 4 - page
    cache.tree.unlock(handle)
    assert cache.match(honest).pages.tolist() == stored.tolist()
    cache.tree.check()


def test_a_million_page_pairs_hit_only_when_equal_x10(harness):
    # 1,000 stored against 1,000 asked pages on 64 keys: almost every pair of keys collides.
    cache = harness(4, key_of=few_keys)
    pages = np.random.default_rng(0).integers(0, 5, (2000, 4)).astype(np.int32)
    owner = {}
    for page in pages[:1000]:
        handle, num_existing, num_stored, (page_id,) = cache.insert(page)
        cache.tree.unlock(handle)
        if num_stored > num_existing:
            owner[tuple(page)] = page_id
    assert 0 < len(owner) <= 64
    for page in pages:
        expected = [owner[tuple(page)]] if tuple(page) in owner else []
        assert cache.match(page).pages.tolist() == expected


def test_namespaces_share_nothing_x13(harness):
    # vllm-project/vllm#39082
    cache = harness(16)
    shared = prompt(0, 64)
    cache.store(shared, "salt A")
    assert cache.hit(shared, "salt B") == 0
    assert cache.hit(shared, "salt A") == 64
    assert cache.hit(shared) == 0
    theirs = cache.store(shared, "salt B")
    assert cache.match(shared, "salt B").pages.tolist() == theirs.tolist()
    assert cache.tree.num_pages == 8


def test_path_of_three_thousand_nodes_needs_no_recursion(harness):
    tree = (cache := harness(1)).tree
    length = 3000
    tokens = np.arange(length, dtype=np.int32)
    pages = cache.store(tokens)
    for end in range(length - 1, 0, -1):
        cache.tree.unlock(cache.lock(tokens[:end]))
    assert len(cache.nodes()) == length
    tree.check()
    handle = cache.lock(tokens)
    assert tree.num_evictable == 0
    tree.unlock(handle)
    assert tree.clear().tolist() == pages[::-1].tolist()
