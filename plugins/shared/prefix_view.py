"""Which replica probably holds which prefixes, as the router sees it.

The router's own record of what it sent where, as SGLang's router keeps an approximate tree: blocks
of prompts by digest, for each replica as many as its pool holds, the least recently sent gone
first. That is the same code and knowledge in simulation and in serving; it errs where a replica
evicted by another rule, served others, or kept outputs. A simulation measures by how much: its
summary puts the tokens that the view expected beside those that were found. A replica that tells
what its cache holds (ReplicaSnapshot.cache) replaces the record of it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.keys import page_keys
from core.request import Request
from plugins.shared.path_digest import namespace_digest, path_digests


class PrefixView:
    """Holders of prefixes at multiples of block_tokens, or of the page size if that is larger.

    A replica's blocks are in the order of their last use, a prompt's first block the newest of it,
    so that what is held stays closed under prefixes. O(blocks of the prompt) a call."""

    def __init__(self, block_tokens: int = 64) -> None:
        require(block_tokens >= 1, "router.block_tokens", ">= 1", block_tokens)
        self.block_tokens = block_tokens
        self._holders: dict[int, int] = {}  # digest -> a bit for each replica that holds it
        self._bits: dict[str, int] = {}
        self._free_bits: list[int] = []
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._capacity: dict[str, int] = {}

    def block_size(self, page_size: int) -> int:
        """Tokens of a block."""
        return self._pages_a_block(page_size) * page_size

    def digests(self, request: Request, page_size: int) -> list[int]:
        """Of the prompt's prefixes at block ends, shortest first; without the last token, which is
        always computed; none for a request that uses no cache."""
        if not request.cache or request.params.prompt_logprobs is not None:
            return []
        pages = self._pages_a_block(page_size)
        usable = (len(request.prompt) - 1) // (pages * page_size) * pages * page_size
        keys = page_keys(request.prompt[:usable], page_size)
        digests = path_digests(keys, before=namespace_digest(request.namespace))
        blocks: list[int] = digests[pages - 1 :: pages].tolist()
        return blocks

    def cached_tokens(
        self, digests: Sequence[int], replicas: Sequence[str], page_size: int
    ) -> NDArray[np.int64]:
        """Tokens that each of `replicas` probably holds of a prompt with these digests."""
        bits = [self._bits.get(replica, 0) for replica in replicas]
        left = 0
        for bit in bits:
            left |= bit
        found: dict[int, int] = {}
        for depth, digest in enumerate(digests):
            held = left & self._holders.get(digest, 0)
            if held != left:
                _note(left ^ held, depth, found)
                left = held
            if not left:
                break
        _note(left, len(digests), found)
        size = self.block_size(page_size)
        return np.array([found.get(bit, 0) * size for bit in bits], np.int64)

    def add(self, replica: str, digests: Sequence[int]) -> list[int]:
        """A prompt went to a replica; returns the digests that are new there."""
        bit, held = self._bit(replica), self._held.setdefault(replica, OrderedDict())
        new = []
        for digest in reversed(digests):
            if digest in held:
                held.move_to_end(digest)
            else:
                held[digest] = None
                self._holders[digest] = self._holders.get(digest, 0) | bit
                new.append(digest)
        self._trim(replica)
        return new

    def forget(self, replica: str, digests: Iterable[int]) -> None:
        """It does not hold these after all."""
        held = self._held.get(replica)
        for digest in digests:
            if held is not None and digest in held:
                del held[digest]
                self._let_go(digest, self._bits[replica])

    def replace(self, replica: str, digests: Sequence[int]) -> None:
        """A replica told what it holds: that and nothing else. Prefixes come before what they
        begin."""
        self.forget(replica, list(self._held.get(replica, ())))
        self.add(replica, digests)

    def resize(self, replica: str, pool_tokens: int, page_size: int) -> None:
        """So many tokens are all that its cache can hold."""
        blocks = pool_tokens // self.block_size(page_size)
        if self._capacity.get(replica) != blocks:
            self._capacity[replica] = blocks
            self._trim(replica)

    def drop(self, replica: str) -> None:
        """A replica is gone with all it held."""
        self.forget(replica, list(self._held.get(replica, ())))
        self._held.pop(replica, None)
        self._capacity.pop(replica, None)
        bit = self._bits.pop(replica, 0)
        if bit:
            self._free_bits.append(bit)

    def num_blocks(self, replica: str) -> int:
        """Blocks that a replica is thought to hold."""
        return len(self._held.get(replica, ()))

    def _pages_a_block(self, page_size: int) -> int:
        return max(self.block_tokens // page_size, 1)

    def _bit(self, replica: str) -> int:
        if replica not in self._bits:
            new = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
            self._bits[replica] = new
        return self._bits[replica]

    def _trim(self, replica: str) -> None:
        held = self._held.get(replica)
        if held is None or replica not in self._capacity:
            return
        while len(held) > self._capacity[replica]:
            digest, _ = held.popitem(last=False)
            self._let_go(digest, self._bits[replica])

    def _let_go(self, digest: int, bit: int) -> None:
        left = self._holders[digest] & ~bit
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]


def _note(bits: int, depth: int, found: dict[int, int]) -> None:
    while bits:
        bit = bits & -bits
        found[bit] = depth
        bits ^= bit
