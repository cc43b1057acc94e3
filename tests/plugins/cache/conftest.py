"""A radix tree with page ids of its own, driven by lists of tokens."""

import numpy as np
import pytest

from core.keys import page_keys
from core.queries import EvictorQuery, PrefixCacheQuery
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix


class Harness:
    """Hands fresh page ids to insertions and keeps what the tree should own."""

    def __init__(self, page_size, evictor=None, key_of=page_keys):
        self.page_size = page_size
        default = Lru().build_evictor(EvictorQuery(page_size))
        self.evictor = default if evictor is None else evictor
        self.tree = Radix().build_prefix_cache(PrefixCacheQuery(page_size, self.evictor))
        self.key_of = key_of
        self.next_page = 1

    def keys(self, tokens):
        tokens = np.asarray(tokens, np.int32)
        whole = len(tokens) // self.page_size * self.page_size
        return self.key_of(tokens[:whole], self.page_size), tokens[:whole]

    def match(self, tokens, namespace=""):
        return self.tree.match(*self.keys(tokens), namespace)

    def lock(self, tokens, namespace=""):
        return self.tree.lock(self.match(tokens, namespace))

    def hit(self, tokens, namespace=""):
        """Tokens served from the cache to a request that comes and goes."""
        match = self.match(tokens, namespace)
        self.tree.unlock(self.tree.lock(match))
        return len(match.pages) * self.page_size

    def insert(self, tokens, namespace=""):
        """(handle, num_existing, num_stored, the page ids offered)"""
        keys, whole = self.keys(tokens)
        pages = np.arange(self.next_page, self.next_page + len(keys), dtype=np.int32)
        self.next_page += len(keys)
        result = (*self.tree.insert(keys, whole, pages, namespace), pages)
        self.tree.check()
        return result

    def store(self, tokens, namespace=""):
        """Insert and unlock; returns the page ids offered."""
        handle, _, _, pages = self.insert(tokens, namespace)
        self.tree.unlock(handle)
        self.tree.check()
        return pages

    def nodes(self):
        """Nodes of the tree, parents before children."""
        found = list(self.tree._roots.values())
        for node in found:
            found.extend(node.children.values())
        return [node for node in found if node.num_pages]


@pytest.fixture
def harness():
    return Harness
