"""Every request's pages enter the prefix cache."""

from core.hookspecs import hookimpl
from core.queries import CacheAdmissionDecision, CacheAdmissionQuery


class AdmitAll:
    """Keeps everything and leaves the choice to eviction."""

    @hookimpl
    def decide_cache_admission(self, query: CacheAdmissionQuery) -> CacheAdmissionDecision:
        """Admit."""
        return CacheAdmissionDecision(admit=True, reason="all pages are kept")
