"""Replays a trace of block ids through the prefix tree itself, one request after another.

A block is a page and its id the page's only token, so that the tree, the evictors and the cache
admissions run as they do in an engine. A request locks what it finds, evicts for what it lacks,
inserts, and ends before the next begins: no output, nothing else pinned. Blocks that do not fit
beside the request's own stay outside."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from core.keys import page_keys
from core.protocols import Pages
from core.queries import (
    CacheAdmissionDecision,
    CacheAdmissionQuery,
    EvictorQuery,
    PrefixCacheQuery,
)
from core.request import Request
from plugins.cache.radix import Radix, RadixTree
from plugins.shared.cache_bounds import CacheUse
from plugins.workload.common import TRACES
from plugins.workload.mooncake import BLOCK_TOKENS, read_mooncake


class BuildsEvictor(Protocol):
    """A plugin that answers build_evictor."""

    def build_evictor(self, query: EvictorQuery) -> Any:
        """An Evictor for nodes of the radix tree."""


class AdmitsToCache(Protocol):
    """A plugin that answers decide_cache_admission."""

    def decide_cache_admission(self, query: CacheAdmissionQuery) -> CacheAdmissionDecision:
        """Whether and how far a request's pages are kept."""


@dataclass(slots=True)
class OracleAdmission:
    """Admits what is asked for again: the first `recurring[i]` tokens of the request of id i."""

    recurring: Sequence[int]

    def decide_cache_admission(self, query: CacheAdmissionQuery) -> CacheAdmissionDecision:
        """By what the trace holds further on."""
        num_tokens = self.recurring[int(query.request.request_id)]
        return CacheAdmissionDecision(num_tokens > 0, "an oracle", num_tokens)


def mooncake(name: str) -> list[Request]:
    """Requests of a shipped Mooncake trace; the prompt is the ids of its blocks, one a token."""
    trace, blocks = read_mooncake(TRACES / "mooncake" / f"{name}_trace.jsonl.gz", name)
    rows = range(len(trace.row))
    return [Request(str(row), blocks.of(row).astype(np.int32)) for row in rows]


def uses_of(requests: Iterable[Request]) -> list[CacheUse]:
    """What they ask of a cache: here the last token counts too, as it is a whole block."""
    return [CacheUse(page_keys(r.prompt, 1), len(r.prompt)) for r in requests]


def replay(
    requests: Iterable[Request], capacity: int, evicts: BuildsEvictor, admits: AdmitsToCache
) -> int:
    """Blocks found, with a pool of `capacity` blocks. Evictors are told the blocks' size, since the
    work of a page depends on it."""
    evictor = evicts.build_evictor(EvictorQuery(BLOCK_TOKENS))
    pool = Pool(Radix().build_prefix_cache(PrefixCacheQuery(1, evictor)), capacity)
    return sum(serve(pool, request, admits) for request in requests)


def serve(pool: "Pool", request: Request, admits: AdmitsToCache) -> int:
    """One request from first to last; returns the blocks that it found."""
    tree, keys = pool.tree, page_keys(request.prompt, 1)
    match = tree.match(keys, None, "")
    found = len(match.pages)
    handle = tree.lock(match)
    query = CacheAdmissionQuery(request, len(keys), found, 0.0)
    decision = admits.decide_cache_admission(query)
    most = decision.num_tokens if decision.num_tokens is not None else len(keys)
    new = pool.take(max(most - found, 0) if decision.admit else 0)
    stop = found + len(new)
    own, _, _ = tree.insert(keys[:stop], None, np.concatenate([match.pages, new]), "")
    tree.unlock(handle)
    tree.unlock(own)
    return found


class Pool:
    """Page ids 1 .. capacity: free, or the tree's."""

    def __init__(self, tree: RadixTree, capacity: int) -> None:
        self.tree = tree
        self._free = np.arange(1, capacity + 1, dtype=np.int32)

    def take(self, num_pages: int) -> Pages:
        """That many pages, evicting as needed, or all there are to have."""
        short = num_pages - len(self._free)
        if short > 0:
            self._free = np.concatenate([self._free, self.tree.evict(short)])
        taken, self._free = self._free[:num_pages], self._free[num_pages:]
        return taken
