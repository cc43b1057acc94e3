"""Pages that running requests and a candidate need at their fullest, when it is given how many
tokens each will still emit.

While nobody ends every request grows by a token a step, so memory is fullest just before somebody
ends: with lengths sorted, longest first, and `left[i]` tokens to come for the i-th, the first i + 1
requests are there and have grown by left[i] each. One formula for Past-Future (Gong et al., ASPLOS
2025) and MC-SF (Jaillet et al., arXiv 2502.07115), here in whole pages.
"""

import numpy as np
from numpy.typing import NDArray

from core.queries import AdmissionQuery

Int64 = NDArray[np.int64]


def peak_pages(tokens: Int64, left: Int64, copies: Int64, page_size: int) -> int:
    """The most pages that requests hold together at any time to come. Each: tokens it has, left:
    tokens it will still emit (>= 1; the KV of the last is never stored), copies: how many such
    requests; int64 [n], n >= 1. O(n (log n + page_size))."""
    order = np.argsort(-left, kind="stable")
    tokens, left, copies = tokens[order], left[order], copies[order]
    full, rest = np.divmod(tokens, page_size)
    grown, further = np.divmod(left - 1, page_size)
    # fuller[i, r]: of the first i + 1 requests, those with r or more tokens on their last page.
    fuller = np.zeros((len(tokens), page_size + 2), np.int64)
    fuller[np.arange(len(tokens)), rest] = copies
    fuller = np.cumsum(np.cumsum(fuller, axis=0)[:, ::-1], axis=1)[:, ::-1]
    # That page and `further` tokens more are a page or two: where they exceed 0, and a page.
    row = np.arange(len(tokens))
    begun = fuller[row, np.maximum(1 - further, 0)]
    second = fuller[row, page_size + 1 - further]
    pages = np.cumsum(copies * full) + np.cumsum(copies) * grown + begun + second
    return int(pages.max())


def own_tokens(query: AdmissionQuery) -> Int64:
    """Known tokens outside the pages of the prefix cache, of the running and last the candidate.

    Cached pages are counted by nobody: they are there already, and `supply` does not hold them."""
    running, candidate = query.running, query.candidate
    own = running.known + running.in_flight - running.pages_shared * query.page_size
    new = candidate.known + candidate.in_flight - query.cached_tokens
    return np.concatenate([own, new]).astype(np.int64)


def copies(query: AdmissionQuery) -> Int64:
    """Sequences that each will be: itself, and the choices (n > 1) that start when its prompt is
    done, counted as if they shared nothing."""
    return np.concatenate([query.running.forks, query.candidate.forks]).astype(np.int64) + 1


def supply(query: AdmissionQuery) -> int:
    """Pages for `own_tokens` and what comes after them: the free, the evictable and those that the
    running hold themselves."""
    held = int(query.running.pages_freed_if_preempted.sum())
    return min(query.pages_free + query.pages_evictable + held, query.pool_pages)
