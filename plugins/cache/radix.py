"""Prefix cache as a radix tree over page keys (RadixAttention, arXiv:2312.07104).

An access costs the nodes and pages of its own path, whatever the size of the tree. Pages that
are locked and used together share a node, so a growing sequence stays one node.
"""

import numpy as np

from core.errors import InvariantError
from core.hookspecs import hookimpl
from core.protocols import Keys, Pages, PrefixMatch
from core.queries import PrefixCacheQuery
from plugins.cache.leaf_offers import LeafOffers
from plugins.cache.page_run import PageRun, Tokens, page_run
from plugins.cache.radix_check import check_tree
from plugins.cache.radix_node import (
    Handle,
    Match,
    Node,
    RootKey,
    append_child,
    cut_tail,
    grow_leaf,
    is_own,
    join_with_child,
    new_root,
    split_node,
    walk,
)
from plugins.shared.cache_protocols import Evictor


class Radix:
    """Reuses whole pages of earlier prompts and outputs."""

    @hookimpl
    def build_prefix_cache(self, query: PrefixCacheQuery) -> "RadixTree":
        """An empty tree that evicts in the order of `query.evictor`."""
        return RadixTree(query.page_size, query.evictor)


class RadixTree:
    """The tree. Paths with tokens and paths of keys alone never match each other.

    Recency: a node's last_used is the number of the latest access (lock or insert) through it. Hits
    count locks of a match only: a sequence that publishes its own pages again is no reuse.
    """

    stores = True

    def __init__(self, page_size: int, evictor: Evictor) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_evictable = 0
        self._leaves = LeafOffers(evictor)
        self.evicts_evenly = self._leaves.evenly
        self._roots: dict[RootKey, Node] = {}
        self._handles: set[Handle] = set()
        self._accesses = 0
        self._version = 0  # changes with every call that may make a match stale

    @property
    def num_handles(self) -> int:
        """Handles not given back yet."""
        return len(self._handles)

    def match(self, keys: Keys, tokens: Tokens | None, namespace: str) -> Match:
        """The longest stored prefix of `keys` whose tokens are equal too. Changes nothing."""
        root = self._roots.get((namespace, tokens is not None))
        path = walk(root, keys, page_run(keys, tokens, self.page_size))
        if not path:
            return Match(np.empty(0, np.int32), 0, None, self._version)
        pages = np.concatenate([node.pages[:count] for node, count in path])
        unlocked = sum(count for node, count in path if node.locks == 0)
        return Match(pages, unlocked, path[-1][0], self._version)

    def lock(self, match: PrefixMatch) -> Handle:
        """Count a hit on every node of the match and keep them from eviction. Raises InvariantError
        for a match made before the tree last changed."""
        node, num_pages = self._fresh(match).node, len(match.pages)
        if node is not None and num_pages < node.depth_pages:
            node = self._split(node, num_pages - (node.depth_pages - node.num_pages))
        handle = self._hold(node)
        for step in self._touch(node):
            step.hits += 1
            self._leaves.hit(step)
        return handle

    def unlock(self, handle: Handle) -> None:
        """Give a handle back. Raises InvariantError for one that is not live."""
        if handle not in self._handles:
            raise InvariantError("a handle must be unlocked once, got one that is not locked")
        self._handles.remove(handle)
        self._version += 1
        step = handle.node
        while step is not None and step.parent is not None:
            step.locks -= 1
            if step.locks == 0:
                self.num_evictable += step.num_pages
                if not step.children:
                    self._leaves.offer(step)
            step = step.parent
        if handle.node is not None:
            self._join(handle.node)

    def insert(
        self,
        keys: Keys,
        tokens: Tokens | None,
        pages: Pages,
        namespace: str,
        after: Handle | None = None,
        uses: int = 1,
    ) -> tuple[Handle, int, int]:
        """Store a path; returns (handle on what is stored of it, num_existing, num_stored):
        pages[num_existing:num_stored] are the tree's from now on. after: a handle on whose path it
        follows, given back. A leaf that only this handle uses grows in place then: pages that a
        sequence adds while it runs came with its first ones."""
        if len(pages) != len(keys):
            raise ValueError(f"pages must have one entry a key ({len(keys)}), got {len(pages)}")
        asked = page_run(keys, tokens, self.page_size)
        if after is None:
            root_key = (namespace, tokens is not None)
            root = self._roots.get(root_key) or new_root(root_key)
            return self._store(root, keys, asked, pages, uses)
        node = after.node
        if after not in self._handles or node is None:
            raise InvariantError("a handle to follow must be locked, and have a page")
        if is_own(node):
            grow_leaf(node, asked, pages)
            self.num_pages += len(keys)
            self._version += 1
            self._touch(node, uses)
            self._leaves.extended(node)
            return after, 0, len(keys)
        stored = self._store(node, keys, asked, pages, uses)
        self.unlock(after)
        return stored

    def settled(self, handle: Handle | None, key: int, namespace: str) -> bool:
        """Whether no page with this key, of the same tokens or others, is there already, and the
        evictor does not care when it comes."""
        node = self._roots.get((namespace, True)) if handle is None else handle.node
        if node is None:
            return self.evicts_evenly
        return key not in node.children and (is_own(node) or self.evicts_evenly)

    def fork(self, handle: Handle) -> Handle:
        """Another handle on the same path; neither a hit nor a use."""
        if handle not in self._handles:
            raise InvariantError("a handle to fork must be locked")
        return self._hold(handle.node)

    def evict(self, num_pages: int) -> Pages:
        """Drop `num_pages` unlocked pages, or all there are: leaves in the evictor's order, each
        from its tail. Returns exactly the pages dropped, int32."""
        wanted = min(int(num_pages), self.num_evictable)
        dropped = []
        if wanted > 0:
            self._version += 1
        while wanted > 0:
            leaf = self._leaves.take(self.num_evictable)
            count = min(wanted, leaf.num_pages)
            if count < leaf.num_pages:
                dropped.append(cut_tail(leaf, count))
                self._leaves.offer(leaf)
            else:
                dropped.append(leaf.pages)
                self._remove(leaf)
            self.num_pages -= count
            self.num_evictable -= count
            wanted -= count
        if len(dropped) == 1:
            return dropped[0]
        return np.concatenate((np.empty(0, np.int32), *dropped))

    def drop(self, match: PrefixMatch) -> Pages:
        """Drop nodes from the end of a match upwards while they are unlocked leaves; returns their
        pages, int32. Raises InvariantError for a match made before the tree last changed."""
        node = self._fresh(match).node
        if node is not None and node.depth_pages > len(match.pages):
            node = None  # a longer path goes through its last node
        dropped = [np.empty(0, np.int32)]
        while node is not None and node.evictable:
            leaf, node = node, node.parent
            self._leaves.withdraw(leaf)
            self._remove(leaf)
            dropped.append(leaf.pages)
            self.num_pages -= leaf.num_pages
            self.num_evictable -= leaf.num_pages
            self._version += 1
        return np.concatenate(dropped)

    def clear(self) -> Pages:
        """Drop everything unlocked."""
        return self.evict(self.num_evictable)

    def check(self) -> None:
        """Recompute links, totals, locks and evictable leaves; raises InvariantError on a
        difference. Linear in the tree and the live handles."""
        check_tree(self._roots.values(), self._handles, self.num_pages, self.num_evictable)

    def _fresh(self, match: PrefixMatch) -> Match:
        if not isinstance(match, Match) or match.version != self._version:
            raise InvariantError(
                f"match must be of the tree's present version {self._version}, got {match!r}:"
                " match again"
            )
        return match

    def _store(
        self, above: Node, keys: Keys, asked: PageRun, pages: Pages, uses: int
    ) -> tuple[Handle, int, int]:
        """Store a path below `above`; see `insert`."""
        path = walk(above, keys, asked)
        existing = stored = sum(count for _, count in path)
        node = path[-1][0] if path else above
        if path and path[-1][1] < node.num_pages:
            node = self._split(node, path[-1][1])
        # A child with this very key stopped the walk by its tokens. It keeps the place.
        if existing < len(keys) and keys.item(existing) not in node.children:
            if node.root_key is not None:
                self._roots[node.root_key] = node
            node = self._append(node, asked, pages, existing)
            stored = len(keys)
        handle = self._hold(None if node.parent is None else node)
        self._touch(handle.node, uses)
        return handle, existing, stored

    def _hold(self, node: Node | None) -> Handle:
        step = node
        while step is not None and step.parent is not None:
            if step.locks == 0:
                self.num_evictable -= step.num_pages
                if step.evictable:
                    self._leaves.withdraw(step)
            step.locks += 1
            step = step.parent
        handle = Handle(node)
        self._handles.add(handle)
        self._version += 1
        return handle

    def _touch(self, node: Node | None, uses: int = 1) -> list[Node]:
        self._accesses += uses
        path = []
        while node is not None and node.parent is not None:
            node.last_used = self._accesses
            path.append(node)
            node = node.parent
        return path

    def _append(self, parent: Node, path: PageRun, pages: Pages, start: int) -> Node:
        if parent.evictable:
            self._leaves.withdraw(parent)
        node = append_child(parent, path, pages, start, self._accesses + 1)
        self.num_pages += node.num_pages
        self.num_evictable += node.num_pages
        self._leaves.inserted(node)
        return node

    def _split(self, node: Node, at: int) -> Node:
        # A leaf on offer shrinks: out and in again, so that an evictor may rank by size.
        offered = node.evictable
        if offered:
            self._leaves.withdraw(node)
        upper = split_node(node, at)
        self._leaves.inserted(upper)
        if offered:
            self._leaves.offer(node)
        return upper

    def _join(self, node: Node) -> None:
        """Undo a boundary that says nothing: no handle ends there, both sides were used alike."""
        if node.locks == 0 or len(node.children) != 1:
            return
        (child,) = node.children.values()
        alike = child.last_used == node.last_used and child.hits == node.hits
        if alike and child.locks == node.locks:
            join_with_child(node, child)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "a root is never evictable"
        del parent.children[leaf.first_key]
        leaf.parent = None
        if parent.children:
            return
        if parent.root_key is not None:
            del self._roots[parent.root_key]
        elif parent.locks == 0:
            self._leaves.offer(parent)
