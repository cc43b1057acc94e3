"""Nodes of the radix tree: runs of pages, with the operations that cut and join them."""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from core.protocols import Keys, Pages

Tokens = NDArray[np.int32]
RootKey = tuple[str, bool]  # namespace; whether its paths have tokens
T = TypeVar("T", bound=np.generic)


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Node:
    """A run of pages below `parent`; a namespace's root has no parent and no pages.

    keys uint64 [num_pages]; tokens int32 [num_pages * page_size], None where only keys are known;
    pages int32 [num_pages]; depth_pages: pages from the root to the node's end. children: by the
    first key of each. locks: handles whose path includes the node. evictable: it is a leaf without
    locks, offered to the evictor. created, last_used: access counts of the cache. hits: locks of a
    match through the node. The arrays are never written, only replaced, so that views of them stay true.
    """

    parent: "Node | None"
    keys: Keys
    tokens: Tokens | None
    pages: Pages
    depth_pages: int
    created: int
    last_used: int
    num_pages: int
    locks: int = 0
    hits: int = 0
    evictable: bool = False
    root_key: RootKey | None = None  # of a root: its place in the tree
    children: "dict[int, Node]" = field(default_factory=dict)

    @property
    def first_key(self) -> int:
        """Its key in the parent's `children`."""
        return int(self.keys[0])


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
    return Node(None, np.empty(0, np.uint64), None, np.empty(0, np.int32), 0, 0, 0, 0, root_key=key)


def append_child(
    parent: Node,
    keys: Keys,
    tokens: Tokens | None,
    pages: Pages,
    start: int,
    page_size: int,
    now: int,
) -> Node:
    """Hang pages `start` onwards of a path below `parent`, as one node with arrays of its own."""
    node = Node(
        parent=parent,
        keys=keys[start:].copy(),
        tokens=None if tokens is None else tokens[start * page_size :].copy(),
        pages=np.array(pages[start:], dtype=np.int32),
        depth_pages=len(keys),
        created=now,
        last_used=now,
        num_pages=len(keys) - start,
    )
    parent.children[node.first_key] = node
    return node


def common_pages(node: Node, keys: Keys, tokens: Tokens | None, start: int, page_size: int) -> int:
    """Leading pages of `node` that equal the path from page `start` on, in key and in tokens."""
    count = min(node.num_pages, len(keys) - start)
    count = _common_head(node.keys[:count], keys[start : start + count])
    if tokens is None or node.tokens is None:
        return count
    asked = tokens[start * page_size : (start + count) * page_size]
    return _common_head(node.tokens[: count * page_size], asked) // page_size


def split_node(node: Node, at: int, page_size: int) -> Node:
    """Cut `node` before its page `at`; returns the new upper half.

    The lower half keeps its identity, so handles, which name the node at their end, stay right.
    Every handle that locked the node runs through both halves: the lock count is copied.
    """
    parent, first_key = node.parent, node.first_key
    assert parent is not None, "a root has no pages to split"
    cut = at * page_size
    upper = Node(
        parent=parent,
        keys=node.keys[:at].copy(),
        tokens=None if node.tokens is None else node.tokens[:cut].copy(),
        pages=node.pages[:at].copy(),
        depth_pages=node.depth_pages - node.num_pages + at,
        created=node.created,
        last_used=node.last_used,
        num_pages=at,
        locks=node.locks,
        hits=node.hits,
    )
    node.keys = node.keys[at:].copy()
    node.tokens = None if node.tokens is None else node.tokens[cut:].copy()
    node.pages = node.pages[at:].copy()
    node.num_pages -= at
    node.parent = upper
    parent.children[first_key] = upper
    upper.children[node.first_key] = node
    return upper


def join_with_child(node: Node, child: Node) -> None:
    """Put the pages of `node` at the head of its only child, which takes its place in the tree."""
    assert node.parent is not None, "a root has no pages to join"
    node.parent.children[node.first_key] = child
    child.parent = node.parent
    child.keys = np.concatenate((node.keys, child.keys))
    if node.tokens is not None and child.tokens is not None:
        child.tokens = np.concatenate((node.tokens, child.tokens))
    child.pages = np.concatenate((node.pages, child.pages))
    child.num_pages += node.num_pages
    child.created = node.created
    node.parent = None
    node.children = {}


def cut_tail(node: Node, count: int, page_size: int) -> Pages:
    """Remove the last `count` pages of a leaf, fewer than it has; returns them."""
    keep = node.num_pages - count
    dropped = node.pages[keep:]
    node.keys = _owned(node.keys[:keep])
    if node.tokens is not None:
        node.tokens = _owned(node.tokens[: keep * page_size])
    node.pages = _owned(node.pages[:keep])
    node.num_pages = keep
    node.depth_pages -= count
    return dropped


def _common_head(stored: NDArray[T], asked: NDArray[T]) -> int:
    # Comparing bytes is several times quicker than numpy on short runs and settles most cases.
    if stored.tobytes() == asked.tobytes():
        return len(stored)
    return int((stored != asked).argmax())


def _owned(view: NDArray[T]) -> NDArray[T]:
    # A view keeps all of its base alive; copying at half the size keeps memory and time linear.
    base = view.base
    return view.copy() if base is not None and 2 * view.nbytes < base.nbytes else view
