"""Short sequences stay out of the cache: what they would save is not worth a node and a page."""

from core.config import require
from core.hookspecs import hookimpl
from core.queries import CacheAdmissionDecision, CacheAdmissionQuery


class MinLength:
    """Keeps sequences of at least `min_tokens` known tokens. The default is the shortest prompt
    that OpenAI's prompt caching keeps."""

    def __init__(self, min_tokens: int = 1024) -> None:
        require(min_tokens >= 1, "min_tokens", ">= 1", min_tokens)
        self.min_tokens = min_tokens

    @hookimpl
    def decide_cache_admission(self, query: CacheAdmissionQuery) -> CacheAdmissionDecision:
        """Admit by length."""
        known, least = query.num_tokens, self.min_tokens
        word = "at least" if known >= least else "fewer than"
        return CacheAdmissionDecision(known >= least, f"{known} tokens, {word} {least}")
