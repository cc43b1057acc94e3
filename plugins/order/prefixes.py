"""What orders ask about prompts: cached tokens of the oldest few, how a prompt begins."""

import numpy as np
from numpy.typing import NDArray

from core.queries import OrderQuery
from core.request import Request

Rows = NDArray[np.int64]


def by_arrival(query: OrderQuery) -> Rows:
    """Rows of the waiting, earliest arrival first, then as submitted; int64."""
    return np.lexsort((query.waiting.arrival_order, query.waiting.arrival_s))


def cached_tokens(query: OrderQuery, rows: Rows) -> NDArray[np.int32]:
    """Tokens of each of the waiting that the cache holds, int32 [all]; 0 for all but `rows`. A
    look costs as much as the prompt is long: ask for a bounded number."""
    cached = np.zeros(len(query.waiting), np.int32)
    cached[rows] = query.cached_tokens(query.waiting.id[rows])
    return cached


def uses_cache(request: Request) -> bool:
    """Whether the request may take pages from the prefix cache, and give some."""
    return request.cache and request.params.prompt_logprobs is None


def beginning(request: Request, num_tokens: int) -> tuple[str, bytes] | None:
    """What two requests have in common that share their first `num_tokens` in the cache; None if
    the request can share none."""
    if len(request.prompt) < num_tokens or not uses_cache(request):
        return None
    return request.namespace, request.prompt[:num_tokens].tobytes()
