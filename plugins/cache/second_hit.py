"""Only what was asked for before enters the cache: a prefix is kept on its second sighting.

The rule by which content delivery networks keep one-hit wonders out (Maggs and Sitaraman, SIGCOMM
CCR 45(3), 2015), on prefixes: a ghost list holds the digests of the prompts' prefixes that were
seen, and of a prompt that part enters which was seen before. Its output enters when it comes back
as a prompt. The price: each prefix is computed twice before it is found once.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.keys import page_keys
from core.queries import CacheAdmissionDecision, CacheAdmissionQuery
from plugins.shared.path_digest import Digests, namespace_digest, path_digests


class SecondHit:
    """block_tokens: prefixes are told apart at multiples of it; best the page size. num_entries: a
    power of two, 8 bytes each: a digest has one place in the list, and the newest keeps it. The
    longest known prefix counts: it was seen with all that is before it, whatever of that was
    overwritten."""

    def __init__(self, block_tokens: int = 16, num_entries: int = 2**20) -> None:
        require(block_tokens >= 1, "block_tokens", ">= 1", block_tokens)
        power = num_entries >= 1 and num_entries & (num_entries - 1) == 0
        require(power, "num_entries", "a power of two", num_entries)
        self.block_tokens = block_tokens
        self.num_entries = num_entries
        self._ghost: Digests = np.zeros(num_entries, np.uint64)

    @hookimpl
    def decide_cache_admission(self, query: CacheAdmissionQuery) -> CacheAdmissionDecision:
        """Admit the prompt as far as it was seen before. O(blocks of the prompt)."""
        keys = page_keys(query.request.prompt, self.block_tokens)
        digests = path_digests(keys, before=namespace_digest(query.request.namespace))
        places = digests & np.uint64(self.num_entries - 1)
        known = np.flatnonzero(self._ghost[places] == digests)
        self._ghost[places] = digests
        num_blocks = int(known[-1]) + 1 if len(known) else 0
        num_tokens = num_blocks * self.block_tokens
        reason = f"{num_tokens} of {len(query.request.prompt)} prompt tokens were seen before"
        return CacheAdmissionDecision(num_blocks > 0, reason, num_tokens)
