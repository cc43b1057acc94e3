"""Digests of prefixes, whole and page by page."""

import numpy as np

from plugins.shared.path_digest import namespace_digest, next_digest, path_digests


def keys_of(*values):
    return np.array(values, np.uint64)


def test_digest_of_a_prefix_does_not_depend_on_what_follows():
    random = np.random.default_rng(0)
    keys = random.integers(0, 2**64, 40, np.uint64)
    whole = path_digests(keys)
    assert path_digests(keys[:13]).tolist() == whole[:13].tolist()
    rest = path_digests(keys[13:], depth=13, before=int(whole[12]))
    assert rest.tolist() == whole[13:].tolist()
    assert len(path_digests(keys[:0])) == 0


def test_digest_page_by_page_equals_that_of_the_array():
    keys = np.random.default_rng(1).integers(0, 2**64, 40, np.uint64)
    start = namespace_digest("tenant")
    digest, found = start, []
    for depth, key in enumerate(keys.tolist()):
        digest = next_digest(key, depth, digest)
        found.append(digest)
    assert found == path_digests(keys, before=start).tolist()


def test_order_place_and_namespace_tell_prefixes_apart():
    ends = [path_digests(keys_of(*path))[-1] for path in ((1, 2), (2, 1), (1, 1), (2, 2), (3,))]
    ends.append(path_digests(keys_of(1, 2), before=namespace_digest("other"))[-1])
    ends.append(path_digests(keys_of(1, 2), depth=1)[-1])
    assert len(set(ends)) == 7


def test_digests_of_small_keys_do_not_collide():
    ends = {int(path_digests(keys_of(a, b))[-1]) for a in range(100) for b in range(100)}
    assert len(ends) == 10_000
