"""Admission where the allocator takes a request's pages all at once."""

from core.queries import AdmissionDecision, AdmissionQuery, Verdict


def reserve(query: AdmissionQuery) -> AdmissionDecision:
    """Admit if the allocator can hand out all that it reserves: the request needs no more later."""
    fits = query.allocatable(query.pages_reserved_at_once)
    text = f"reserves {query.pages_reserved_at_once} pages at once, {query.pages_free} free"
    return AdmissionDecision(Verdict.ADMIT if fits else Verdict.WAIT, text)
