"""KV memory of one engine over allocator, cache and ledger: start, growth, publishing, release.

Plugins propose pages and victims; every change of ownership happens here, through the ledger."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.block_table import BlockTable, Int32
from core.errors import ConfigError, InvariantError
from core.keys import page_keys
from core.launch import Repeats
from core.ledger import PageClass, PageLedger
from core.protocols import Allocator, PrefixCache, PrefixMatch
from core.request import Sequence
from core.table import SequenceTable

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Look:
    """A candidate's place in the cache now: the match, None when the cache is not asked."""

    match: PrefixMatch | None
    cached_tokens: int
    pages_needed: int
    pages_at_most: int
    pages_reserved: int  # to take at once on admission, 0 = on demand
    pages_evictable: int


class KVMemory:
    """Pages of all sequences. rows: where the device finds them."""

    def __init__(
        self, allocator: Allocator, cache: PrefixCache, table: SequenceTable, rows: BlockTable
    ) -> None:
        if cache.stores and not allocator.shares_pages:
            raise ConfigError(
                f"cache must be none with allocator {type(allocator).__name__}, whose pages end"
                f" with their request, got {type(cache).__name__}"
            )
        self.allocator = allocator
        self.cache = cache
        self.ledger = PageLedger(allocator.num_pages)
        self.page_size = allocator.page_size
        self.rows = rows
        self.max_pages = rows.pages.shape[1]  # of the longest sequence
        self.opened: set[int] = set()  # slots of rows that no launch has set up
        self.pages_evicted = 0
        self._table = table

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens, rounded up."""
        return -(-num_tokens // self.page_size)

    @property
    def supply(self) -> int:
        """Pages free or evictable."""
        return self.ledger.num_free + self.cache.num_evictable

    def allocatable(self, num_pages: int) -> bool:
        """Whether `num_pages` could be had at once, evicting if needed."""
        if self.cache.num_evictable:
            return num_pages <= self.supply
        return self.allocator.can_allocate(num_pages)

    def pages_of(self, sequence: Sequence) -> NDArray[np.int32]:
        """A sequence's pages in order: a view, empty without a row."""
        if sequence.row is None:
            return self.rows.pages[0, :0]
        return self.rows.pages[sequence.row, : self._table.pages_held[sequence.slot]]

    def look(self, sequence: Sequence) -> Look:
        """Match the known tokens, at most all but the last: one must run to yield logits."""
        known = int(self._table.known[sequence.slot])
        match, cached = None, 0
        if self.uses_cache(sequence):
            limit = (known - 1) // self.page_size
            keys = self._keys(sequence, known)[:limit]
            tokens = self._table.token_array(sequence, 0, limit * self.page_size)
            match = self.cache.match(keys, tokens, sequence.request.namespace)
            cached = len(match.pages)
        longest = int(self._table.prompt[sequence.slot] + self._table.max_output[sequence.slot]) - 1
        longest = min(max(longest, known), self.max_pages * self.page_size)
        needed, at_most = self.pages_for(known) - cached, self.pages_for(longest) - cached
        reserved = self.allocator.reserved_at_admission(needed, at_most)
        evictable = self.cache.num_evictable - (match.num_unlocked_pages if match else 0)
        return Look(match, cached * self.page_size, needed, at_most, reserved, evictable)

    def uses_cache(self, sequence: Sequence) -> bool:
        """Prompt log-probabilities need every prompt position computed, so these skip it."""
        request = sequence.request
        return self.cache.stores and request.cache and request.params.prompt_logprobs is None

    def start(self, sequence: Sequence, look: Look) -> bool:
        """Give a sequence a row and its cached prefix; False, and nothing changed, if the allocator
        has to reserve pages at once and cannot."""
        handle = self.cache.lock(look.match) if look.match and len(look.match.pages) else None
        pages = self._allocate(look.pages_reserved) if look.pages_reserved else _NO_PAGES
        if pages is None:
            if handle is not None:
                self.cache.unlock(handle)
            return False
        cached = look.match.pages if look.match else _NO_PAGES
        self._open_row(sequence, cached, handle)
        held = len(cached) + len(pages)
        self.rows.pages[sequence.row, len(cached) : held] = pages
        self._table.pages_held[sequence.slot] = held
        self._table.computed[sequence.slot] = look.cached_tokens
        return True

    def fork(self, parent: Sequence, child: Sequence, num_pages: int) -> None:
        """Start `child` on the first `num_pages` pages of `parent`, shared."""
        handle = self.cache.fork(parent.prefix) if parent.prefix is not None else None
        self._open_row(child, self.pages_of(parent)[:num_pages].copy(), handle)
        child.cacheable = parent.cacheable
        self._table.computed[child.slot] = num_pages * self.page_size

    def pages_short(self, slots: Slots, num_tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages that each row lacks to compute `num_tokens` more, int32."""
        ends = self._table.computed[slots] + num_tokens + np.int32(self.page_size - 1)
        needed: NDArray[np.int32] = ends // self.page_size - self._table.pages_held[slots]
        return np.maximum(needed, 0, out=needed)

    def grow(self, slots: Slots, num_tokens: Int32, repeats: Repeats | None = None) -> list[float]:
        """Append the pages that `slots` lack for `num_tokens` more, the supply must hold them; for
        several steps they are evicted one by one. Returns pages taken after a step, and how many of
        those were free until then: means."""
        later, counts = [0.0, 0.0], self.pages_short(slots, num_tokens)
        growing = counts.nonzero()[0]
        slots, counts = slots[growing], counts[growing]
        if not (total := sum(counts.tolist())):
            return later
        if repeats is not None:
            taken = np.add.reduce(self.pages_short(slots, repeats.each[:, growing]), axis=1)
            left = np.maximum(self.ledger.num_free - taken, 0)
            later = [total - repeats.mean(taken), repeats.mean(left) - int(left[-1])]
            self._evict([total] if self.cache.evicts_evenly else taken.tolist())
        pages = self._allocate(total)
        if pages is None:
            raise InvariantError(f"{total} pages not to be had from a supply of {self.supply}")
        rows, held = self._table.row[slots], self._table.pages_held[slots]
        begin = held + counts - np.add.accumulate(counts)
        places = np.arange(total) + np.repeat(begin, counts)
        self.rows.pages[np.repeat(rows, counts), places] = pages
        self._table.pages_held[slots] = held + counts
        return later

    def publish(self, sequence: Sequence, ends: list[int] | None = None) -> int:
        """Offer the whole computed pages to the cache; ends: those of the last of these numbers, as
        if of each in turn. Returns tokens that were computed in vain because another sequence had
        published the same pages meanwhile."""
        slot, size = sequence.slot, self.page_size
        ends = ends or [int(self._table.computed[slot])]
        num_pages = min(ends[-1] // size, sequence.cacheable or 0)
        before = int(self._table.pages_published[slot])
        if sequence.row is None or num_pages <= before:
            return 0
        uses = len({min(end // size, num_pages) for end in ends} - {before})
        handle = sequence.prefix
        start = before if handle is not None and handle.num_pages == before else 0
        part = (
            self._keys(sequence, num_pages * size)[start:num_pages],
            self._table.token_array(sequence, start * size, num_pages * size),
            self.rows.pages[sequence.row, start:num_pages].copy(),
        )
        after = handle if start else None
        namespace = sequence.request.namespace
        sequence.prefix, existing, stored = self.cache.insert(*part, namespace, after, uses)
        if handle is not None and after is None:
            self.cache.unlock(handle)
        self.ledger.to_tree(part[2][existing:stored])
        self._table.pages_shared[slot] += max(stored - existing, 0)
        self._table.pages_published[slot] = num_pages
        return max(start + existing - before, 0) * size

    def publishes_apart(self, slots: Slots) -> bool:
        """Whether the cache does not care when and in which order these publish their pages."""
        nexts = set[int]()
        for sequence in map(self._table.at, slots.tolist()):
            keys = self._keys(sequence, int(self._table.known[sequence.slot]))
            before, handle = int(self._table.pages_published[sequence.slot]), sequence.prefix
            if sequence.cacheable == 0 or not self.uses_cache(sequence) or len(keys) <= before:
                continue
            key, there = keys.item(before), before == (handle.num_pages if handle else 0)
            alike = there and self.cache.settled(handle, key, sequence.request.namespace)
            if key in nexts or not alike:
                return False
            nexts.add(key)
        return True

    def release(self, sequence: Sequence) -> int:
        """Take everything from a sequence; returns the pages that no one else held, cached ones
        apart. Its row comes back once no launch in flight uses it."""
        if sequence.row is None:
            return 0
        slot = sequence.slot
        freed = self.ledger.drop(self.pages_of(sequence).copy())
        self.allocator.free(freed)
        if sequence.prefix is not None:
            self.cache.unlock(sequence.prefix)
            sequence.prefix = None
        self.rows.retire(sequence.row)
        self.opened.discard(slot)
        sequence.row = None
        for column in ("pages_held", "pages_shared", "pages_published"):
            self._table.columns[column][slot] = 0
        self._table.row[slot] = -1
        return len(freed)

    def forget(self, sequence: Sequence) -> None:
        """A released sequence went wrong: its pages leave the cache unless others use them."""
        if sequence.cacheable:
            keys = self._keys(sequence, len(self._table.tokens(sequence)))
            tokens = self._table.token_array(sequence)[: len(keys) * self.page_size]
            match = self.cache.match(keys, tokens, sequence.request.namespace)
            self.allocator.free(self.ledger.from_tree(self.cache.drop(match)))

    def _open_row(self, sequence: Sequence, pages: NDArray[np.int32], handle: object) -> None:
        sequence.row = self.rows.open(pages)
        sequence.prefix = handle
        table, slot = self._table, sequence.slot
        self.ledger.share(pages)
        self.opened.add(slot)
        table.row[slot] = sequence.row
        table.pages_held[slot] = len(pages)
        table.pages_shared[slot] = self.ledger.classes.take(pages).tolist().count(PageClass.TREE)
        table.pages_published[slot] = len(pages) if handle is not None else 0

    def _allocate(self, num_pages: int) -> NDArray[np.int32] | None:
        self._evict([num_pages])
        pages = self.allocator.allocate(num_pages)
        if pages is not None:
            self.ledger.take(pages, f"allocator {type(self.allocator).__name__}")
        return pages

    def _evict(self, wanted: list[int]) -> None:
        """Evict until so many pages are free, for each of `wanted` in turn, or nothing is left to
        evict. Dropping a page that a sequence still uses frees nothing."""
        dropped, free = [], self.ledger.num_free
        for num_free in wanted:
            while num_free > free and self.cache.num_evictable:
                dropped.append(pages := self.cache.evict(num_free - free))
                free += int(np.count_nonzero(self.ledger.refs.take(pages, mode="clip") == 0))
        if dropped:
            pages = np.concatenate(dropped) if len(dropped) > 1 else dropped[0]
            self.pages_evicted += len(pages)
            self.allocator.free(self.ledger.from_tree(pages))

    def _keys(self, sequence: Sequence, num_tokens: int) -> NDArray[np.uint64]:
        have = len(sequence.page_keys)
        want = num_tokens // self.page_size
        if want > have:
            size = self.page_size
            new = page_keys(self._table.token_array(sequence, have * size, want * size), size)
            sequence.page_keys = np.concatenate([sequence.page_keys, new])
        return sequence.page_keys


_NO_PAGES = np.empty(0, np.int32)
