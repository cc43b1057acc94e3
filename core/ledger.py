"""The page ledger: each page's class and how many sequences use it. It alone changes either."""

import numpy as np
from numpy.typing import NDArray

from core.errors import InvariantError
from core.table import some

Pages = NDArray[np.int32]


class PageClass:
    """RESERVED: page 0. TREE: the prefix cache's, whoever else uses it. REQUEST: its users'. Plain
    numbers: numpy compares with an IntEnum ten times slower."""

    RESERVED, FREE, TREE, REQUEST = range(4)
    NAMES = "RESERVED", "FREE", "TREE", "REQUEST"


class PageLedger:
    """Classes and reference counts of pages 0 .. num_pages; page 0 is never handed out.

    A page returns to FREE when the last of cache and sequences lets go of it. There is no class for
    pages read by a launch in flight: launches run in order, so the next may rewrite them."""

    def __init__(self, num_pages: int) -> None:
        self._bounded = np.full(num_pages + 2, PageClass.RESERVED, np.int8)
        self.classes = self._bounded[:-1]  # ids outside, clipped, are RESERVED
        self.classes[1:] = PageClass.FREE
        self.refs = np.zeros(num_pages + 1, np.int32)
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_tree = 0
        self.request_refs = 0  # references to REQUEST pages: above their number, pages are shared

    @property
    def num_request(self) -> int:
        """Pages owned by sequences alone."""
        return self.num_pages - self.num_free - self.num_tree

    def take(self, pages: Pages, by: str) -> None:
        """FREE -> REQUEST with one reference. Raises InvariantError naming `by`, the allocator."""
        self._require(pages, PageClass.FREE, f"{by} handed out")
        self.classes.put(pages, PageClass.REQUEST)
        self.refs.put(pages, 1)
        self.num_free -= len(pages)
        self.request_refs += len(pages)

    def share(self, pages: Pages) -> None:
        """One more sequence uses `pages`."""
        classes = self._bounded.take(pages, mode="clip")
        if some(classes < PageClass.TREE):
            raise InvariantError(f"shared pages that nobody owns: {self._named(pages)}")
        self.refs[pages] += 1
        self.request_refs += int(np.count_nonzero(classes == PageClass.REQUEST))

    def drop(self, pages: Pages) -> Pages:
        """A sequence lets go of `pages`; returns those that became FREE."""
        left = self.refs.take(pages) - np.int32(1)
        if some(left < 0):
            named = self._named(pages[left < 0])
            raise InvariantError(f"pages dropped more often than used: {named}")
        self.refs.put(pages, left)
        owned = self.classes.take(pages) == PageClass.REQUEST
        self.request_refs -= int(np.count_nonzero(owned))
        return self._free(pages[owned & (left == 0)])

    def to_tree(self, pages: Pages) -> None:
        """REQUEST -> TREE: the prefix cache took them over; users stay users."""
        self._require(pages, PageClass.REQUEST, "the cache took")
        self.classes.put(pages, PageClass.TREE)
        self.num_tree += len(pages)
        self.request_refs -= sum(self.refs.take(pages).tolist())

    def from_tree(self, pages: Pages) -> Pages:
        """The cache dropped `pages`; returns those that became FREE. Users keep theirs."""
        self._require(pages, PageClass.TREE, "the cache dropped")
        self.num_tree -= len(pages)
        refs = self.refs.take(pages)
        if not (used := sum(refs.tolist())):
            return self._free(pages)
        self.classes.put(pages, PageClass.REQUEST)
        self.request_refs += used
        return self._free(pages[refs == 0])

    def _free(self, pages: Pages) -> Pages:
        self.classes.put(pages, PageClass.FREE)
        self.num_free += len(pages)
        return pages

    def _require(self, pages: Pages, owner: int, who: str) -> None:
        """Raise InvariantError, changing nothing, unless `pages` are distinct ids of a class."""
        wrong = self._bounded.take(pages, mode="clip") != owner
        if some(wrong):
            named = self._named(pages[wrong])
            raise InvariantError(f"{who} pages that are not {PageClass.NAMES[owner]}: {named}")
        if len(set(pages.tolist())) < len(pages):
            raise InvariantError(f"{who} a page twice: {sorted(pages.tolist())}")

    def _named(self, pages: Pages) -> str:
        inside = [p for p in pages.tolist() if 0 <= p <= self.num_pages]
        named = [f"{p} ({PageClass.NAMES[self.classes[p]]}, {self.refs[p]} users)" for p in inside]
        outside = [f"{p} (no such page)" for p in pages.tolist() if not 0 <= p <= self.num_pages]
        return ", ".join(named[:8] + outside[:8])
