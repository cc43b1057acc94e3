"""Page keys: a 64-bit digest of each whole page of tokens, the token id itself at page size 1.

A digest only finds candidates: the cache compares the stored tokens before it calls them equal, so
a crafted collision costs a miss, never a wrong page."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

# 2^64 / golden ratio, odd (Knuth's multiplicative hashing)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)  # an odd multiplier with well spread bits
_SHIFT = np.uint64(32)


def page_keys(tokens: NDArray[np.int32], page_size: int) -> NDArray[np.uint64]:
    """Keys of the whole pages of `tokens` int32 [n]: uint64 [n // page_size]."""
    num_pages = len(tokens) // page_size
    whole = tokens[: num_pages * page_size].astype(np.uint64)
    if page_size == 1:
        return whole
    return _scramble(whole.reshape(num_pages, page_size) @ _weights(page_size))


@cache
def _weights(page_size: int) -> NDArray[np.uint64]:
    """An odd number for each place in a page."""
    return _scramble(np.arange(1, page_size + 1, dtype=np.uint64) * _MULTIPLIER) | np.uint64(1)


def _scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words ^ (words >> _SHIFT)
    words = words * _MIX
    words = words ^ (words >> _SHIFT)
    words = words * _MIX
    return words ^ (words >> _SHIFT)
