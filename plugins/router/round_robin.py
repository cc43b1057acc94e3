"""Round robin: one after the other, whatever they do. The baseline that sees nothing."""

from core.hookspecs import hookimpl
from plugins.shared.routing import RouteDecision, RouteQuery


class RoundRobin:
    """The ready replicas in the order in which they joined. When one comes or goes, the turn stays
    with whoever stands at its place then."""

    def __init__(self) -> None:
        self._turn = 0

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        """No scores."""
        ids = query.replicas.ids
        chosen = ids[self._turn % len(ids)]
        self._turn += 1
        return RouteDecision(chosen, reason="its turn")
