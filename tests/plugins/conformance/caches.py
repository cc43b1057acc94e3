"""Evictors and prefix caches: random sequences of insertions, hits, locks and evictions on a small
tree, held against a plain model, and how many operations a call takes as the tree grows."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from core.errors import TritiumError
from core.keys import page_keys
from core.queries import EvictorQuery, PrefixCacheQuery
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from tests.plugins.conformance.counting import CountedNode, counted
from tests.plugins.conformance.rules import BrokenRuleError
from tests.plugins.conformance.sequences import hold_for_all
from tests.plugins.conformance.subject import Subject

Step = tuple[str, tuple[int, ...], int]
Broken = Callable[[str], Exception]

KINDS = ("store", "hit", "end", "evict")
OFTEN = (0.25, 0.25, 0.3, 0.2)
SIZES = 256, 4096
MOST_GROWTH = 3.0
"""Operations of a call at 16 times the nodes; a logarithm grows by 1.5."""


def keeps_its_promises(subject: Subject, hook: str) -> None:
    """Any sequence of uses: an evictor offers what is on offer, each node once; a cache matches
    what was stored, evicts nothing that is locked and gives every page back."""

    def broken(text: str) -> Exception:
        return BrokenRuleError("protocol", subject, hook, text)

    def run(steps: list[Step]) -> None:
        _Driven(subject, hook, broken).run(steps)

    hold_for_all(run, _draw, 60 if subject.quick else 400)


def _draw(rng: np.random.Generator) -> Step:
    path = tuple(rng.integers(0, 2, rng.integers(1, 5)).tolist())
    return str(rng.choice(KINDS, p=OFTEN)), path, int(rng.integers(0, 5))


def forgets_what_went(subject: Subject) -> None:
    """An evictor holds on to no node that was evicted or dropped."""
    driven = _Driven(subject, "build_evictor", lambda text: AssertionError(text))
    driven.run([("store", (0, 1), 0), ("store", (0, 2), 0), ("end", (0,), 0), ("hit", (0, 1), 0)])
    gc.collect()
    left = sum(one() is not None for one in driven.gone)
    if left:
        text = f"{left} of {len(driven.gone)} nodes that were evicted are still referred to"
        raise BrokenRuleError("protocol", subject, "build_evictor", text)


def operations(subject: Subject) -> str:
    """Comparisons, reads of facts and lines run by a call of an evictor, at two sizes; raises
    BrokenRuleError if they grow faster than a logarithm. Returns what was counted."""
    few, many = (_operations_at(subject.make(), size) for size in SIZES)
    text = f"{few:.0f} operations a call with {SIZES[0]:,} nodes, {many:.0f} with {SIZES[1]:,}"
    if many > MOST_GROWTH * max(few, 1.0):
        text += ": each call must take constant or logarithmic time"
        raise BrokenRuleError("operations", subject, "build_evictor", text)
    return text


def _operations_at(plugin: Any, size: int, rounds: int = 60) -> float:
    evictor = plugin.build_evictor(query=EvictorQuery(16))
    rng = np.random.default_rng(0)
    nodes = [CountedNode(serial, int(rng.integers(1, 9))) for serial in range(size)]
    for node in nodes:
        evictor.on_insert(node)
        evictor.on_unlock(node)
    with counted() as count:
        for serial in range(size, size + rounds):
            used = nodes[int(rng.integers(size))]
            evictor.on_lock(used)
            used.use(serial)
            evictor.on_hit(used)
            evictor.on_unlock(used)
            gone = evictor.pop()
            node = CountedNode(serial, int(rng.integers(1, 9)))
            nodes[nodes.index(gone)] = node
            evictor.on_insert(node)
            evictor.on_unlock(node)
    return count.total / (7 * rounds)


class _Offers:
    """Between a tree and the evictor: what is on offer, by the tree's own calls."""

    def __init__(self, evictor: Any, broken: Broken) -> None:
        self.evictor, self.broken = evictor, broken
        self.offered: set[Any] = set()
        self.gone: list[Any] = []
        self.remembers = getattr(evictor, "remembers", True)
        self.on_extend = getattr(evictor, "on_extend", None)

    def on_insert(self, node: Any) -> None:
        self.evictor.on_insert(node)

    def on_hit(self, node: Any) -> None:
        self.evictor.on_hit(node)

    def on_lock(self, node: Any) -> None:
        self.offered.remove(node)
        self.evictor.on_lock(node)

    def on_unlock(self, node: Any) -> None:
        self.offered.add(node)
        self.evictor.on_unlock(node)

    def pop(self) -> Any:
        try:
            node = self.evictor.pop()
        except LookupError as error:
            text = f"pop raised LookupError, {len(self.offered)} nodes are on offer"
            raise self.broken(text) from error
        if node not in self.offered:
            raise self.broken(f"pop returned {type(node).__name__}, which is not on offer")
        self.offered.remove(node)
        self.gone.append(weakref.ref(node))
        return node


class _Driven:
    """A cache under a sequence of steps, beside a dictionary of what it should hold."""

    def __init__(self, subject: Subject, hook: str, broken: Broken) -> None:
        plugin, evictor_query = subject.make(), EvictorQuery(1)
        evictor = Lru().build_evictor(evictor_query)
        builder: Any = Radix()
        if hook == "build_evictor":
            evictor = plugin.build_evictor(query=evictor_query)
        else:
            builder = plugin
        self.steps: list[Step] = []
        self.broken: Broken = lambda text: broken(f"{text}; after {self.steps}")
        self.offers = _Offers(evictor, self.broken)
        self.gone = self.offers.gone
        self.cache = builder.build_prefix_cache(query=PrefixCacheQuery(1, self.offers))
        self.held: list[tuple[Any, list[int]]] = []
        self.owned: set[int] = set()
        self.at: dict[tuple[int, ...], int] = {}
        self.next_page = 1

    def run(self, steps: list[Step]) -> None:
        """All steps; then everything is given back."""
        try:
            for kind, path, number in steps:
                self.steps.append((kind, path, number))
                getattr(self, f"_{kind}")(path, number)
                self._check()
            while self.held:
                self._end((), 0)
            self._clear((), 0)
            self._check_empty()
        except TritiumError as error:
            raise self.broken(str(error)) from error

    def _store(self, path: tuple[int, ...], number: int) -> None:
        keys, tokens = _keys(path)
        pages = np.arange(self.next_page, self.next_page + len(path), dtype=np.int32)
        self.next_page += len(path)
        handle, existing, stored = self.cache.insert(keys, tokens, pages, "")
        for length in range(existing + 1, stored + 1):
            self.at[path[:length]] = int(pages[length - 1])
            self.owned.add(int(pages[length - 1]))
        locked = [self.at[path[:length]] for length in range(1, stored + 1)]
        self.held.append((handle, locked))

    def _hit(self, path: tuple[int, ...], number: int) -> None:
        match = self.cache.match(*_keys(path), "")
        found = np.asarray(match.pages).tolist()
        wanted = [self.at.get(path[:length]) for length in range(1, len(found) + 1)]
        if found != wanted:
            raise self.broken(f"match of {path} is pages {found}, stored there are {wanted}")
        if self.cache.stores and len(found) < len(path) and path[: len(found) + 1] in self.at:
            raise self.broken(f"match of {path} is {len(found)} pages long, more are stored")
        self.held.append((self.cache.lock(match), found))

    def _end(self, path: tuple[int, ...], number: int) -> None:
        if self.held:
            handle, _ = self.held.pop(number % len(self.held))
            self.cache.unlock(handle)

    def _evict(self, path: tuple[int, ...], number: int) -> None:
        wanted = min(number, self.cache.num_evictable)
        self._given_back(self.cache.evict(number), wanted)

    def _clear(self, path: tuple[int, ...], number: int) -> None:
        self._given_back(self.cache.clear(), self.cache.num_evictable)

    def _given_back(self, pages: Any, at_least: int) -> None:
        given = np.asarray(pages).tolist()
        locked = {page for _, pages in self.held for page in pages}
        if len(given) < at_least or len(set(given)) != len(given):
            raise self.broken(f"evict gave {given}, asked for {at_least} distinct pages")
        if wrong := set(given) & locked or set(given) - self.owned:
            raise self.broken(f"evict gave pages {sorted(wrong)}, which are locked or not its own")
        self.owned -= set(given)
        self.at = {path: page for path, page in self.at.items() if page in self.owned}

    def _check(self) -> None:
        self.cache.check()
        if self.cache.num_pages != len(self.owned):
            text = f"num_pages is {self.cache.num_pages}, it was given {len(self.owned)} and kept"
            raise self.broken(f"{text} them")
        if self.cache.num_handles != len(self.held):
            raise self.broken(f"num_handles is {self.cache.num_handles} of {len(self.held)}")

    def _check_empty(self) -> None:
        if self.owned:
            raise self.broken(f"clear left {len(self.owned)} pages that no handle locks")
        try:
            left = self.offers.evictor.pop()
        except LookupError:
            return
        raise self.broken(f"pop returned {type(left).__name__} though nothing is on offer")


def _keys(path: tuple[int, ...]) -> tuple[Any, Any]:
    tokens = np.array(path, np.int32)
    return page_keys(tokens, 1), tokens
