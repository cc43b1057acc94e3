"""Defer twins: requests that begin like one in prefill wait for the pages it is about to publish.

Requests that come together with a long common prefix would all start before any of it is cached and
compute it once each. SGLang puts such requests behind the first one; here only the first starts.
"""

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, AdmissionQuery, Ids, Verdict
from core.request import Request


class DeferTwins:
    """Skip a request while a running one computes whole pages that both prompts begin with; leave
    all others to the default.

    min_tokens: shorter common prefixes are not worth a wait. A request waits for running requests
    alone and only for pages to come: it is free once the cache holds the common pages, or the other
    ended, was preempted or is kept out of the cache. Needs a prefix cache: with cache=none twins
    may start one a step.
    """

    def __init__(self, min_tokens: int = 32) -> None:
        require(min_tokens >= 1, "min_tokens", ">= 1", min_tokens)
        self.min_tokens = min_tokens

    @hookimpl
    def decide_admission(self, query: AdmissionQuery) -> AdmissionDecision | None:
        """SKIP, so that others may pass and nobody is displaced for a twin; None: no objection."""
        running, cached = query.running, query.cached_tokens
        coming = running.computed < running.prompt
        shared = _shared_tokens(query, running.id[coming])
        most = int(shared.max(initial=0))
        if most < self.min_tokens or not _computed_is_cached(query):
            return None
        row = np.flatnonzero(coming)[shared.argmax()]
        leader = query.request(int(running.id[row])).request_id
        text = f"{leader!r} computes the first {most} tokens, {cached} are cached"
        return AdmissionDecision(Verdict.SKIP, text)


def _computed_is_cached(query: AdmissionQuery) -> bool:
    """False if a twin's computed pages did not reach the cache: those to come will not either."""
    done = query.running.computed // query.page_size * query.page_size
    shared = _shared_tokens(query, query.running.id)
    return bool((np.minimum(shared, done) <= query.cached_tokens).all())


def _shared_tokens(query: AdmissionQuery, ids: Ids) -> NDArray[np.int64]:
    """Tokens of the whole pages that the candidate could take from the cache, were the prompt of
    each of `ids` in it; 0 if no more than it finds there now. int64 [len(ids)]."""
    shared = np.zeros(len(ids), np.int64)
    candidate, size = query.request(int(query.candidate.id[0])), query.page_size
    missing = slice(query.cached_tokens, query.cached_tokens + size)  # the first page not cached
    if not _uses_cache(candidate) or missing.stop >= len(candidate.prompt):
        return shared
    page = candidate.prompt[missing].tobytes()
    for index, one in enumerate(ids.tolist()):
        other = query.request(one)
        if other.prompt[missing].tobytes() != page:  # cheap, and enough for most
            continue
        if other.namespace == candidate.namespace and _uses_cache(other):
            num = min(len(candidate.prompt) - 1, len(other.prompt))  # one must run to yield logits
            differs = np.flatnonzero(candidate.prompt[:num] != other.prompt[:num])
            shared[index] = (differs[0] if len(differs) else num) // size * size
    return np.where(shared > query.cached_tokens, shared, 0)


def _uses_cache(request: Request) -> bool:
    return request.cache and request.params.prompt_logprobs is None
