"""How far any prefix cache could go: bounds of its hits, computed from the requests alone.

Each bound replays the requests one after another on a cache of `capacity` pages and counts pages
found, always as a prefix: a page is of use only behind all that come before it.

- infinite: nothing is ever evicted (walk of a seen-set). The ceiling of any cache.
- Belady's MIN (IBM Systems Journal 5, 1966) on the tree: after each request keep the pages whose
  next use is nearest; of pages with the same next use, the deepest go first; a page just computed
  is not kept if its own next use is the furthest (bypass). A page is never asked for without the
  pages before it, so a child's next use is never before its parent's: what is kept stays closed
  under prefixes, and MIN is exactly optimal in pages found. (Not in FLOPs: deep pages cost more.)
- oracle admission + LRU: least recently used, deepest first, but only pages that are asked for
  again enter.
- LRU: the same with every page entering.

An engine pins the pages of running requests and serves many at a time, which none of these does.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.keys import page_keys
from core.protocols import Keys
from core.request import Request

Path = list[int]  # ids of prefixes, one a page


@dataclass(frozen=True, slots=True, eq=False)
class CacheUse:
    """One request as a cache sees it. keys uint64 [n]: the pages it leaves behind, in order; the
    first `num_asked` of them it would take from the cache. namespace: prefixes match within one."""

    keys: Keys
    num_asked: int
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Pages that each cache would have found, out of `pages_asked`; capacity in pages."""

    capacity: int
    pages_asked: int
    infinite: int
    belady_min: int
    oracle_admission_lru: int
    lru: int

    def rate(self, pages_found: int) -> float:
        """A share of the pages asked for; 0 where none were."""
        return pages_found / self.pages_asked if self.pages_asked else 0.0

    @property
    def lost_to_capacity(self) -> float:
        """Hit rate that no rule can have at this capacity."""
        return self.rate(self.infinite - self.belady_min)

    @property
    def lost_to_admission(self) -> float:
        """Hit rate that LRU loses by letting in pages that nobody asks for again."""
        return self.rate(self.oracle_admission_lru - self.lru)

    @property
    def lost_to_eviction(self) -> float:
        """Hit rate that LRU still loses behind an oracle's admission."""
        return self.rate(self.belady_min - self.oracle_admission_lru)


@dataclass(frozen=True, slots=True)
class PrefixTrace:
    """Uses whose prefixes have ids: equal ids are equal prefixes. next_use: for each page the
    index of the next request that asks for it, `never` if none does."""

    paths: list[Path]
    num_asked: list[int]
    next_use: list[list[int]]
    never: int

    @property
    def pages_asked(self) -> int:
        """Pages over all requests that a cache could serve."""
        return sum(self.num_asked)

    def recurring(self) -> list[int]:
        """For each request how many of its pages are asked for again: always the first ones."""
        return [
            sum(use < self.never for use in uses)  # no child recurs where its parent does not
            for uses in self.next_use
        ]


def cache_bounds(uses: Iterable[CacheUse], capacity: int) -> CacheBounds:
    """All bounds for one capacity in pages. Time: pages * log(pages). ConfigError if capacity < 1
    or a num_asked is not within its keys."""
    return trace_bounds(prefix_trace(uses), capacity)


def trace_bounds(trace: PrefixTrace, capacity: int) -> CacheBounds:
    """The same from a trace, which serves any number of capacities."""
    require(capacity >= 1, "capacity", ">= 1 page", capacity)
    return CacheBounds(
        capacity=capacity,
        pages_asked=trace.pages_asked,
        infinite=infinite_hits(trace),
        belady_min=belady_min_hits(trace, capacity),
        oracle_admission_lru=lru_hits(trace, capacity, trace.recurring()),
        lru=lru_hits(trace, capacity, [len(path) for path in trace.paths]),
    )


def prompt_uses(
    requests: Iterable[Request],
    page_size: int,
    outputs: Mapping[str, NDArray[np.int32]] | None = None,
) -> list[CacheUse]:
    """What an engine's requests ask of its cache: whole pages of all but the last prompt token.

    outputs: generated token ids by request id, where they are known: they are left behind too, all
    but the last, whose KV is never computed. Requests that skip the cache are left out."""
    uses = []
    for request in requests:
        if not request.cache or request.params.prompt_logprobs is not None:
            continue
        tokens = request.prompt
        if outputs is not None:
            tokens = np.concatenate([tokens, outputs[request.request_id][:-1]])
        num_asked = (len(request.prompt) - 1) // page_size
        uses.append(CacheUse(page_keys(tokens, page_size), num_asked, request.namespace))
    return uses


def prefix_trace(uses: Iterable[CacheUse]) -> PrefixTrace:
    """Name every prefix and find its next use."""
    ids: dict[tuple[int | str, int], int] = {}  # (the prefix before, or the namespace; key) -> id
    paths, num_asked = [], []
    for use in uses:
        require(0 <= use.num_asked <= len(use.keys), "num_asked", "within its keys", use.num_asked)
        prefix: int | str = use.namespace
        path: Path = []
        for key in use.keys.tolist():
            prefix = ids.setdefault((prefix, key), len(ids))
            path.append(prefix)
        paths.append(path)
        num_asked.append(use.num_asked)
    return PrefixTrace(paths, num_asked, _next_uses(paths, num_asked), len(paths))


def _next_uses(paths: Sequence[Path], num_asked: Sequence[int]) -> list[list[int]]:
    never = len(paths)
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for index in range(len(paths) - 1, -1, -1):
        path = paths[index]
        uses.append([following.get(prefix, never) for prefix in path])
        following.update(dict.fromkeys(path[: num_asked[index]], index))
    uses.reverse()
    return uses


def infinite_hits(trace: PrefixTrace) -> int:
    """Pages found by a cache without end."""
    seen: set[int] = set()
    hits = 0
    for path, num_asked in zip(trace.paths, trace.num_asked, strict=True):
        hits += _found(path[:num_asked], seen)
        seen.update(path)
    return hits


def belady_min_hits(trace: PrefixTrace, capacity: int) -> int:
    """Pages found by the best cache of `capacity` pages that knows the future."""
    kept: dict[int, int] = {}  # prefix -> its next use
    furthest: list[tuple[int, int, int]] = []  # (-next use, -depth, prefix), some out of date
    hits = 0
    for path, num_asked, uses in zip(trace.paths, trace.num_asked, trace.next_use, strict=True):
        hits += _found(path[:num_asked], kept)
        for depth, (prefix, use) in enumerate(zip(path, uses, strict=True)):
            if use == trace.never:
                kept.pop(prefix, None)
            else:
                kept[prefix] = use
                heappush(furthest, (-use, -depth, prefix))
        while len(kept) > capacity:
            use, _, prefix = heappop(furthest)
            if kept.get(prefix) == -use:
                del kept[prefix]
    return hits


def lru_hits(trace: PrefixTrace, capacity: int, admitted: Sequence[int]) -> int:
    """Pages found by LRU on the tree's leaves, where the first `admitted[i]` pages of request i may
    enter."""
    kept: OrderedDict[int, None] = OrderedDict()  # oldest first
    hits = 0
    for path, num_asked, limit in zip(trace.paths, trace.num_asked, admitted, strict=True):
        found = _found(path[:num_asked], kept)
        hits += found
        # The deepest first: a leaf is then always older than what it hangs on.
        for prefix in reversed(path[: max(found, limit)]):
            kept[prefix] = None
            kept.move_to_end(prefix)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits


def _found(path: Path, kept: Mapping[int, object] | set[int]) -> int:
    for depth, prefix in enumerate(path):
        if prefix not in kept:
            return depth
    return len(path)
