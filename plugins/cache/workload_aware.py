"""Workload-aware eviction (Wang et al., USENIX ATC 2025, arXiv:2506.02634) on leaves.

Requests of one category reuse what they cached after times that are close to exponential. So for
each category w a distribution is fitted, and a leaf of age t is worth the probability that it is
used again within the time that it can expect to stay:

    p_w * (F_w(t + life) - F_w(t)),   F_w(t) = 1 - exp(-t / mean_w)

p_w: share of the category's uses that were followed by another; mean_w: mean time to that; life:
mean age of the leaves that were evicted lately. The least goes first, among equals the deepest
(prefix offset): heads of prompts are kept. Within a category worth falls with age, so each category
is a heap by last use, and only their first leaves are compared.

What an evictor can know, and so what stands for the paper's figures:
- Time is the cache's access counter (one a request admitted or published), not seconds: the fit
  does not change with the load, and no clock is needed.
- The category (there: kind of request and turn) is the turn of what is kept, its uses so far beyond
  the first: a cache node knows no kind.
- Turns and times are observed beyond the cache: what was evicted is remembered by name for a while,
  and goes on from there when it comes back. What is forgotten was not used again; so the memory
  has the order of the cache's size, or the fit learns late what is worthless.
- Observations lose weight, by `decay` at each of their category, and a category with few leans on
  the mean of all.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, log, log1p
from typing import NamedTuple

from core.config import require
from core.hookspecs import hookimpl
from core.queries import EvictorQuery
from plugins.cache.leaf_heap import LeafHeap
from plugins.cache.tree_node import TreeNode
from plugins.shared.cache_protocols import CacheNode

FEWEST_NAMES = 16  # to remember at least


class WorkloadAware:
    """max_turn: nodes of later turns are of this category. history: names of evicted leaves to
    remember, over the leaves on offer. decay: of older observations. prior_weight: observations of
    all categories that each starts with. life_share: of the newest eviction in the mean life.
    Defaults: ours, chosen on two Mooncake traces (experiments/cache_bounds)."""

    def __init__(
        self,
        max_turn: int = 8,
        history: float = 1.0,
        decay: float = 0.999,
        prior_weight: float = 8.0,
        life_share: float = 0.01,
    ) -> None:
        require(max_turn >= 0, "max_turn", ">= 0", max_turn)
        require(history > 0, "history", "> 0", history)
        require(0 < decay <= 1, "decay", "in (0, 1]", decay)
        require(prior_weight > 0, "prior_weight", "> 0", prior_weight)
        require(0 < life_share <= 1, "life_share", "in (0, 1]", life_share)
        self.max_turn = max_turn
        self.history = history
        self.decay = decay
        self.prior_weight = prior_weight
        self.life_share = life_share

    @hookimpl
    def build_evictor(self, query: EvictorQuery) -> "WorkloadAwareEvictor":
        """An order of its own for one cache."""
        return WorkloadAwareEvictor(self)


class Use(NamedTuple):
    """A node's memo: the access of its last use that was counted, and its turn before the hits that
    it counts itself."""

    access: int
    turns_before: int


@dataclass(slots=True)
class ReuseFit:
    """Weighted sums of what was seen of one category: uses that were followed by another, the time
    until then, and uses that were not. It starts with one of each, a time unit apart."""

    reused: float = 1.0
    time: float = 1.0
    unused: float = 1.0

    def observe(self, after: int | None, decay: float) -> None:
        """A use that was followed by another `after` accesses, or (None) not at all."""
        self.reused *= decay
        self.time *= decay
        self.unused *= decay
        if after is None:
            self.unused += 1.0
        else:
            self.reused += 1.0
            self.time += after

    def leaning_on(self, prior: "ReuseFit", weight: float) -> tuple[float, float]:
        """(probability of reuse, mean time to it) with `weight` observations like those of
        `prior` added."""
        share = prior.reused / (prior.reused + prior.unused)
        probability = (self.reused + weight * share) / (self.reused + self.unused + weight)
        mean = (self.time + weight * prior.time / prior.reused) / (self.reused + weight)
        return probability, mean


class WorkloadAwareEvictor:
    """A heap for each category."""

    remembers = True

    def __init__(self, settings: WorkloadAware) -> None:
        self._settings = settings
        self._heaps: dict[int, LeafHeap[TreeNode]] = {}
        self._fits: dict[int, ReuseFit] = {}
        self._all = ReuseFit()
        self._evicted: OrderedDict[int, Use] = OrderedDict()  # its turn, all hits counted
        self._life: float | None = None
        self._now = 0

    def __len__(self) -> int:
        """Nodes on offer."""
        return sum(map(len, self._heaps.values()))

    def on_insert(self, node: TreeNode) -> None:
        """A new node may be an evicted one that is wanted again. Half of a split one is not."""
        self._now = max(self._now, node.last_used)
        if node.memo is not None:
            return
        gone = self._evicted.pop(node.head_digest, None)
        turns = 0 if gone is None else gone.turns_before + 1
        node.memo = Use(node.created, turns)
        if gone is not None:
            self._observe(gone.turns_before, node.created - gone.access)

    def on_extend(self, node: TreeNode) -> None:
        """The time to its next use counts from now."""
        self._now = max(self._now, node.last_used)
        node.memo = Use(node.last_used, node.memo.turns_before)

    def on_hit(self, node: TreeNode) -> None:
        """Count the time since the node's last use, for the category that it had until now."""
        self._now = max(self._now, node.last_used)
        self._observe(self._turn(node) - 1, node.last_used - node.memo.access)
        node.memo = Use(node.last_used, node.memo.turns_before)

    def on_lock(self, node: TreeNode) -> None:
        """Take a node off offer."""
        self._heap(node).withdraw(node)

    def on_unlock(self, node: TreeNode) -> None:
        """Put a node on offer; O(log n)."""
        self._now = max(self._now, node.last_used)
        self._heap(node).offer(node, (node.last_used, -node.depth_pages))

    def pop(self) -> CacheNode:
        """Take the leaf that is least likely to be used in time; O(categories + log n). Raises
        LookupError if none is on offer."""
        offers = [(category, *heap.first()) for category, heap in self._heaps.items() if heap]
        if not offers:
            raise LookupError("no evictable node")
        category, _, node = min(
            offers, key=lambda offer: (self._worth(offer[0], offer[2]), -offer[2].depth_pages)
        )
        self._heaps[category].pop()
        self._note_eviction(node)
        return node

    def _worth(self, category: int, node: CacheNode) -> float:
        """Logarithm of the probability of reuse within the expected life: it has no underflow."""
        fit = self._fits.get(category, self._all)
        probability, mean = fit.leaning_on(self._all, self._settings.prior_weight)
        worth = log(probability) - (self._now - node.last_used) / mean
        if self._life is None:
            return worth  # nothing was evicted yet: no end is in sight
        return worth + log1p(-exp(-max(self._life, 1.0) / mean))

    def _note_eviction(self, node: TreeNode) -> None:
        age, share = self._now - node.last_used, self._settings.life_share
        self._life = age if self._life is None else (1 - share) * self._life + share * age
        self._evicted[node.head_digest] = Use(node.memo.access, self._turn(node))
        most = max(FEWEST_NAMES, self._settings.history * len(self))
        while len(self._evicted) > most:
            _, forgotten = self._evicted.popitem(last=False)
            self._observe(forgotten.turns_before, None)

    def _observe(self, turn: int, after: int | None) -> None:
        fit = self._fits.setdefault(self._category(turn), ReuseFit())
        for each in (fit, self._all):
            each.observe(after, self._settings.decay)

    def _heap(self, node: TreeNode) -> LeafHeap[TreeNode]:
        return self._heaps.setdefault(self._category(self._turn(node)), LeafHeap())

    def _turn(self, node: TreeNode) -> int:
        turns: int = node.memo.turns_before + node.hits
        return turns

    def _category(self, turn: int) -> int:
        return min(turn, self._settings.max_turn)
