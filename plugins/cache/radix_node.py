"""Nodes of the radix tree: runs of pages, with the operations that find, cut and join them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.protocols import Keys, Pages
from plugins.cache.page_run import PageRun
from plugins.shared.path_digest import namespace_digest, next_digest, path_digests

RootKey = tuple[str, bool]  # namespace; whether its paths have tokens


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Node:
    """A run of pages below `parent`; a namespace's root has no parent and no pages.

    first_key: of its first page, its key in the parent's `children`. content: at least num_pages
    pages (a trimmed leaf may keep more for a while). pages int32 [num_pages], never written, only
    replaced. depth_pages: pages from the root to the node's end. locks: handles whose path includes
    the node. evictable: it is a leaf without locks, offered to the evictor. created, last_used:
    access counts of the cache. hits: locks of a match through the node. memo: the evictor's own;
    both halves of a split node start with it.
    """

    parent: "Node | None"
    first_key: int
    content: PageRun
    pages: Pages
    num_pages: int
    depth_pages: int
    created: int
    last_used: int
    locks: int = 0
    hits: int = 0
    evictable: bool = False
    memo: Any = None
    root_key: RootKey | None = None  # of a root: its place in the tree
    children: "dict[int, Node]" = field(default_factory=dict)
    _end_digest: int | None = None  # of the path down to the node's end, once someone asked

    @property
    def head_digest(self) -> int:
        """Digest of the path down to and including the node's first page: what names it after it is
        gone. Worked out once for the pages above, on first use."""
        assert self.parent is not None, "a root has no pages to name"
        depth = self.depth_pages - self.num_pages
        return next_digest(self.first_key, depth, self.parent._digest())

    def _digest(self) -> int:
        above: list[Node] = []
        node = self
        while node._end_digest is None and node.parent is not None:
            above.append(node)
            node = node.parent
        assert node._end_digest is not None, "a root is made with its digest"
        digest = node._end_digest
        for node in reversed(above):
            keys = node.content.page_keys(node.num_pages)
            digest = int(path_digests(keys, node.depth_pages - node.num_pages, digest)[-1])
            node._end_digest = digest
        return digest


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What `RadixTree.match` found: pages int32 [n]; how many of them no handle locks; the node
    that holds the last one (None without a hit); the tree's version it is valid for."""

    pages: Pages
    num_unlocked_pages: int
    node: Node | None
    version: int


@dataclass(slots=True, eq=False)
class Handle:
    """A lock on the path that ends with the last page of `node`; None: the empty path."""

    node: Node | None

    @property
    def num_pages(self) -> int:
        """Pages on the locked path."""
        return 0 if self.node is None else self.node.depth_pages


def new_root(key: RootKey) -> Node:
    """A node without parent and pages."""
    nothing = PageRun(b"", None, 1)
    root = Node(None, 0, nothing, np.empty(0, np.int32), 0, 0, 0, 0, root_key=key)
    root._end_digest = namespace_digest(key[0])
    return root


def append_child(parent: Node, path: PageRun, pages: Pages, start: int, now: int) -> Node:
    """Hang pages `start` onwards of a path below `parent`, as one node with a copy of them."""
    node = Node(
        parent=parent,
        first_key=path.key(start),
        content=path.part(start, len(path)),
        pages=np.array(pages[start:], dtype=np.int32),
        num_pages=len(path) - start,
        depth_pages=parent.depth_pages + len(path) - start,
        created=now,
        last_used=now,
    )
    parent.children[node.first_key] = node
    return node


def grow_leaf(leaf: Node, added: PageRun, pages: Pages) -> None:
    """Put more pages at the end of a leaf."""
    leaf.content = leaf.content.part(0, leaf.num_pages).followed_by(added)
    leaf.pages = np.concatenate((leaf.pages, pages))
    leaf.num_pages += len(added)
    leaf.depth_pages += len(added)
    leaf._end_digest = None


def split_node(node: Node, at: int) -> Node:
    """Cut `node` before its page `at`; returns the new upper half.

    The lower half keeps its identity, so handles, which name the node at their end, stay right.
    Every handle that locked the node runs through both halves: the lock count is copied.
    """
    parent = node.parent
    assert parent is not None, "a root has no pages to split"
    upper = Node(
        parent=parent,
        first_key=node.first_key,
        content=node.content.part(0, at),
        pages=node.pages[:at].copy(),
        num_pages=at,
        depth_pages=node.depth_pages - node.num_pages + at,
        created=node.created,
        last_used=node.last_used,
        locks=node.locks,
        hits=node.hits,
        memo=node.memo,
    )
    parent.children[upper.first_key] = upper
    node.parent = upper
    node.content = node.content.part(at, node.num_pages)
    node.first_key = node.content.key(0)
    node.pages = node.pages[at:].copy()
    node.num_pages -= at
    upper.children[node.first_key] = node
    return upper


def join_with_child(node: Node, child: Node) -> None:
    """Put the pages of `node` at the head of its only child, which takes its place in the tree."""
    parent = node.parent
    assert parent is not None, "a root has no pages to join"
    parent.children[node.first_key] = child
    child.parent = parent
    child.first_key = node.first_key
    child.content = node.content.part(0, node.num_pages).followed_by(child.content)
    child.pages = np.concatenate((node.pages, child.pages))
    child.num_pages += node.num_pages
    child.created = node.created
    node.parent = None
    node.children = {}


def cut_tail(node: Node, count: int) -> Pages:
    """Remove the last `count` pages of a leaf, fewer than it has; returns them."""
    keep = node.num_pages - count
    dropped = node.pages[keep:]
    node.pages = node.pages[:keep]
    node.num_pages = keep
    node.depth_pages -= count
    node._end_digest = None
    # Copying at half the size keeps both the cost of many small cuts and the memory linear.
    if 2 * keep < len(node.content):
        node.content = node.content.part(0, keep)
        node.pages = node.pages.copy()
    return dropped


def walk(above: Node | None, keys: Keys, asked: PageRun) -> list[tuple[Node, int]]:
    """(node, pages of it that match) below a node, top down; only the last may match in
    part."""
    path: list[tuple[Node, int]] = []
    node, start = above, 0
    while node is not None and start < len(keys):
        node = node.children.get(keys.item(start))
        if node is None:
            break
        if node.content.is_at(asked, start):
            path.append((node, node.num_pages))
            start += node.num_pages
            continue
        most = min(node.num_pages, len(keys) - start)
        count = node.content.common_pages(asked, start, most)
        if count:
            path.append((node, count))
        if count < node.num_pages:
            break
        start += count
    return path


def is_own(node: Node) -> bool:
    """Whether a leaf is what one handle has stored, and nobody else used."""
    return node.locks == 1 and not node.children and not node.hits
