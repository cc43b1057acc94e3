"""Interfaces of the objects that `build_*` hooks return and the core calls. Those that it never
calls are in plugins/shared: model_protocols.py, of an executor's; cache_protocols.py, a cache's."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, LaunchResult, PoolLayout
from core.records import RequestRecord, StepRecord
from core.request import Request

Pages = NDArray[np.int32]
Keys = NDArray[np.uint64]
Tokens = NDArray[np.int32] | None


class Allocator(Protocol):
    """Chooses which free pages to hand out; the core's ledger owns them. Ids: 1 .. num_pages."""

    page_size: int
    num_pages: int  # usable pages, page 0 not counted
    shares_pages: bool  # False: pages end with their request, so no prefix cache may hold them

    @property
    def num_free(self) -> int:
        """Free pages."""

    def reserved_at_admission(self, pages_needed: int, pages_at_most: int) -> int:
        """Pages to take when a request is admitted: 0 = on demand."""

    def can_allocate(self, num_pages: int) -> bool:
        """Whether `allocate(num_pages)` would succeed now."""

    def allocate(self, num_pages: int) -> Pages | None:
        """Take `num_pages` distinct free pages, int32, or None and nothing changes."""

    def free(self, pages: Pages) -> None:
        """Give pages back. Raises InvariantError for one that is free already."""

    def unusable_pages(self, num_pages: int) -> int:
        """Free pages of runs too short for a request of `num_pages` (external fragmentation)."""

    def check(self) -> None:
        """Compare the books with each other; raises InvariantError. Called in strict mode."""


class PrefixMatch(Protocol):
    """A matched prefix. Valid until the cache next changes (lock, unlock, insert, evict, clear)."""

    @property
    def pages(self) -> Pages:
        """Page ids in order, int32."""

    @property
    def num_unlocked_pages(self) -> int:
        """Of them evictable now: what locking would take from the supply."""


class PrefixCache(Protocol):
    """Index of reusable pages by content. Owns what it holds until `evict` or `clear` returns it.

    keys: uint64 [n], a digest a page; tokens: int32 [n * page_size] or None when only digests exist
    (recorded traces); namespace: prefixes match only within one. A handle locks until `unlock`."""

    stores: bool  # False: it never keeps a page, and need not be asked
    evicts_evenly: bool  # pages evicted at once are those that would go one by one
    num_pages: int
    num_evictable: int  # pages no handle locks

    @property
    def num_handles(self) -> int:
        """Handles given out and not unlocked."""

    def match(self, keys: Keys, tokens: Tokens, namespace: str) -> PrefixMatch:
        """The longest cached prefix, in whole pages. Changes no recency: a look is not a use."""

    def lock(self, match: PrefixMatch) -> Any:
        """Use a match: refresh recency along the path, keep it from eviction, return the handle."""

    def unlock(self, handle: Any) -> None:
        """Give a handle back, once."""

    def insert(
        self, keys: Keys, tokens: Tokens, pages: Pages, namespace: str, after: Any, uses: int
    ) -> tuple[Any, int, int]:
        """Store pages for `keys`; returns a locked handle on what is stored of the path now,
        num_existing: leading pages that were there already, and num_stored: leading pages that are
        there now. pages[num_existing:num_stored] now belong to the cache; the others do not change
        owner. num_stored is below len(keys) where a page has the key of a stored one but other
        tokens, and 0 if nothing is kept. after: a handle on whose path, not empty, they follow; it
        is given back for the new one. uses: how many accesses it counts as."""

    def settled(self, handle: Any | None, key: int, namespace: str) -> bool:
        """Whether a page with this key would be stored after the handle's path (None: as a first
        one) just the same once others are evicted."""

    def fork(self, handle: Any) -> Any:
        """Another handle on the same path."""

    def evict(self, num_pages: int) -> Pages:
        """Drop and return at least so many pages of unlocked leaves, or all there are, int32."""

    def drop(self, match: PrefixMatch) -> Pages:
        """Drop and return the end of a match as far as it is unlocked and no path goes on."""

    def check(self) -> None:
        """Recompute totals, locks and evictable leaves from scratch; raises InvariantError on a
        difference. Strict mode calls it after every step."""


class LengthPredictor(Protocol):
    """Guesses output lengths. Requests show `forced_output` only if its plugin has a true attribute
    `oracle`; the run is then labelled so."""

    def predict(self, request: Request) -> float:
        """Expected output tokens, asked once when the request arrives."""

    def observe(self, record: RequestRecord) -> None:
        """A request ended; its true lengths are in the record."""


class Executor(Protocol):
    """Computes launches in order, on one stream: k + 1 may rewrite pages freed after k."""

    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...]
    computes: bool  # False: launches come without token_ids and table_updates

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, None without one."""

    def measure_pool(self, layout: PoolLayout) -> int:
        """engine.pool_tokens=auto: KV slots that memory holds beside all else, in whole pages, with
        page 0 at most layout.num_pages. Called before `prepare`. Raises ConfigError if one request
        of layout.max_pages does not fit, or there is no memory to measure."""

    def prepare(self, layout: PoolLayout) -> None:
        """Allocate pool, tables and buffers. Called once, before the first launch."""

    def launch(self, launch: Launch) -> None:
        """Start a launch; returns without waiting for the device. Raises LaunchError if this one
        cannot be made: it is not collected then, and its rows are set up anew before further use.
        Any other exception, here or in `collect`, stops the engine."""

    def collect(self) -> LaunchResult:
        """Wait for the oldest uncollected launch."""

    def describe(self) -> dict[str, Any]:
        """Device, dtype, attention backend and kernel configurations, for the manifest."""

    def close(self) -> None:
        """Release the device."""


class Sink(Protocol):
    """Receives a run's records. Opened by construction, closed once. In mode bench a step comes
    once the next has begun, and on a CUDA device from a thread of the sinks, one call at a time; a
    sink that acts on the engine or device sets `immediate = True` (plugins/mode/outlet.py)."""

    def step(self, record: StepRecord) -> None:
        """One step, in order."""

    def request(self, record: RequestRecord) -> None:
        """One ended request."""

    def close(self, run: Any, summary: dict[str, Any]) -> None:
        """The run, a RunInfo, is over. summary: plugins.mode.summary's result."""
