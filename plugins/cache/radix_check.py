"""The radix tree's books, recomputed from scratch to hold its running totals against."""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from core.errors import InvariantError
from core.protocols import Pages
from plugins.cache.radix_node import Handle, Node


def check_tree(
    roots: Iterable[Node],
    handles: Collection[Handle],
    num_pages: int,
    num_evictable: int,
) -> None:
    """Raise InvariantError if a link, a run, a lock count, an evictable leaf or a total is not what
    nodes and handles say, or a page is stored twice. Linear in nodes and handles' paths."""
    nodes = _nodes_below(roots)
    locks = _locks(handles)
    for node in nodes:
        _check_run(node)
        _check_state(node, locks.pop(node, 0))
    if locks:
        raise _broken(f"handles must lock nodes of the tree, got {len(locks)} nodes outside it")
    total = sum(node.num_pages for node in nodes)
    if num_pages != total:
        raise _broken(f"num_pages must be {total}, got {num_pages}")
    unlocked = sum(node.num_pages for node in nodes if node.locks == 0)
    if num_evictable != unlocked:
        raise _broken(f"num_evictable must be {unlocked}, got {num_evictable}")
    pages: Pages = np.concatenate([np.empty(0, np.int32), *(node.pages for node in nodes)])
    distinct = len(set(pages.tolist()))
    if distinct != total:
        raise _broken(f"pages must be stored once, got {total} places for {distinct} pages")


def _nodes_below(roots: Iterable[Node]) -> list[Node]:
    nodes: list[Node] = []
    open_nodes = list(roots)
    for root in open_nodes:
        if not root.children:
            raise _broken(f"a root must have children, got none at {root.root_key}")
    while open_nodes:
        node = open_nodes.pop()
        for key, child in node.children.items():
            if child.parent is not node:
                raise _broken("a child must name its parent")
            if child.first_key != key:
                raise _broken(f"a child must stand at its first key, got {key}")
            depth = node.depth_pages + child.num_pages
            if child.depth_pages != depth:
                raise _broken(f"depth_pages must be {depth}, got {child.depth_pages}")
        nodes.extend(node.children.values())
        open_nodes.extend(node.children.values())
    return nodes


def _locks(handles: Iterable[Handle]) -> Counter[Node]:
    locks: Counter[Node] = Counter()
    for handle in handles:
        step = handle.node
        while step is not None and step.root_key is None:
            locks[step] += 1
            step = step.parent
    return locks


def _check_run(node: Node) -> None:
    if node.num_pages < 1:
        raise _broken(f"a node must hold >= 1 page, got {node.num_pages}")
    if len(node.pages) != node.num_pages or len(node.content) < node.num_pages:
        lengths = (len(node.pages), len(node.content))
        raise _broken(f"a node of {node.num_pages} pages must hold as many, got {lengths}")
    if node.first_key != node.content.key(0):
        raise _broken(f"first_key must be {node.content.key(0)}, got {node.first_key}")


def _check_state(node: Node, locks: int) -> None:
    if node.locks != locks:
        raise _broken(f"locks must be the {locks} of live handles, got {node.locks}")
    evictable = locks == 0 and not node.children
    if node.evictable != evictable:
        raise _broken(f"evictable must be {evictable} at {locks} locks, got {node.evictable}")


def _broken(text: str) -> InvariantError:
    return InvariantError(f"prefix cache: {text}")
