"""Depth first through the tree of waiting prompts, the heavier subtree first (SGLang, Zheng et al.,
NeurIPS 2024, arXiv:2312.07104; `dfs-weight` there).

A node's weight is the number of requests below it. Requests that share a prefix are served together
before the next prefix is begun; for requests known in advance, visiting their radix tree depth
first is optimal in hits if the cache holds the longest of them (theorem 3.1). Children come before
the requests that end at a node.

The tree here is that of the waiting prompts, as in the theorem; sglang's code walks the cache's, in
which requests that share what is not computed yet do not meet. An order stands until somebody new
waits, so that a walk leaves no subtree half done because it became lighter on the way. Where
several slots are free, the first requests of a subtree start together and each compute its prefix:
pair it with `defer_twins`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import Hold, OrderDecision, OrderQuery
from plugins.order.prefixes import by_arrival, uses_cache


@dataclass(frozen=True, slots=True)
class Prompt:
    """A leaf in the order of prompts: its place in the queue, its tokens so that bytes compare as
    they do (None: it can share nothing)."""

    place: int
    namespace: str
    tokens: bytes | None

    @property
    def sort_key(self) -> tuple[bool, str, bytes, int]:
        """Equal beginnings lie together; a prompt comes before its continuations."""
        return self.tokens is None, self.namespace, self.tokens or b"", self.place


class DfsWeight:
    """min_tokens: shorter common prefixes do not count. window: how many of the oldest are put
    into the tree; the others follow by arrival."""

    starves = "a lighter subtree waits while a heavier one is refilled"

    def __init__(self, min_tokens: int = 32, window: int = 512) -> None:
        require(min_tokens >= 1, "min_tokens", ">= 1", min_tokens)
        require(window >= 1, "window", ">= 1", window)
        self.min_tokens = min_tokens
        self.window = window
        self._ranks: dict[int, float] = {}  # id -> place in the walk

    @hookimpl
    def decide_order(self, query: OrderQuery) -> OrderDecision:
        """Places in the walk; for this step alone."""
        ids = query.waiting.id.tolist()
        if not self._ranks.keys() >= set(ids):
            self._walk(query)
        keys = np.fromiter((self._ranks[one] for one in ids), np.float64, len(ids))
        return OrderDecision(keys, Hold.STEP, "depth first, heavier subtree first")

    def _walk(self, query: OrderQuery) -> None:
        rows, ids = by_arrival(query).tolist(), query.waiting.id.tolist()
        prompts = []
        for place, row in enumerate(rows[: self.window]):
            request = query.request(ids[row])
            tokens = request.prompt.astype(">u4").tobytes() if uses_cache(request) else None
            prompts.append(Prompt(place, request.namespace, tokens))
        order = [prompt.place for prompt in depth_first(prompts, self.min_tokens)]
        order += range(len(order), len(rows))
        self._ranks = {ids[rows[place]]: float(rank) for rank, place in enumerate(order)}


def depth_first(prompts: list[Prompt], min_tokens: int) -> Iterator[Prompt]:
    """The prompts along the walk; subtrees of equal weight by their earliest request."""
    prompts = sorted(prompts, key=lambda prompt: prompt.sort_key)
    shared = np.zeros(len(prompts), np.int64)  # tokens in common with the one before
    for index in range(1, len(prompts)):
        common = _common_tokens(prompts[index - 1], prompts[index])
        shared[index] = common if common >= min_tokens else 0
    todo = [(0, len(prompts))]  # ranges of prompts, a subtree each; the next one last
    while todo:
        begin, end = todo.pop()
        if end - begin <= 1:
            yield from prompts[begin:end]
            continue
        # A subtree's prompts part at its root: where neighbours share no more than all do.
        depth = int(shared[begin + 1 : end].min())
        cuts = (begin + 1 + np.flatnonzero(shared[begin + 1 : end] == depth)).tolist()
        children = list(zip([begin, *cuts], [*cuts, end], strict=True))
        todo += sorted(children, key=lambda one: _rank(prompts, one, depth), reverse=True)


def _rank(prompts: list[Prompt], child: tuple[int, int], depth: int) -> tuple[bool, int, int]:
    """Of a child: those that end at the node itself last, then by weight, then by arrival."""
    begin, end = child
    tokens = prompts[begin].tokens
    own = end - begin == 1 and tokens is not None and len(tokens) == 4 * depth
    return own, begin - end, min(prompt.place for prompt in prompts[begin:end])


def _common_tokens(left: Prompt, right: Prompt) -> int:
    if left.tokens is None or right.tokens is None or left.namespace != right.namespace:
        return 0
    most = min(len(left.tokens), len(right.tokens))
    differs = np.frombuffer(left.tokens[:most], np.uint32) != np.frombuffer(
        right.tokens[:most], np.uint32
    )
    return int(differs.argmax()) if differs.any() else most // 4
