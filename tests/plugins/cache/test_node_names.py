"""What names a node of the tree after it is gone."""

import numpy as np

from plugins.shared.path_digest import namespace_digest, path_digests


def test_node_is_named_by_its_path_whatever_was_split_joined_and_trimmed(harness):
    cache = harness(1)
    random = np.random.default_rng(2)
    handles = []
    for _ in range(250):
        path = random.integers(0, 3, random.integers(1, 9))
        move = random.integers(4)
        if move == 0:
            handles.append(cache.insert(path, namespace="ns")[0])
        elif move == 1 and handles:
            cache.tree.unlock(handles.pop(random.integers(len(handles))))
        elif move == 2:
            cache.hit(path, namespace="ns")
        else:
            cache.tree.evict(random.integers(4))
        for node in cache.nodes():
            path = whole_path(node)
            digests = path_digests(path, before=namespace_digest("ns"))
            assert node.head_digest == digests[len(path) - node.num_pages]


def whole_path(node):
    parts = []
    while node.parent is not None:
        parts.append(node.content.page_keys(node.num_pages))
        node = node.parent
    return np.concatenate(parts[::-1])
