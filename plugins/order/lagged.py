"""Facts of steps for orders, given out at a time that overlapped launches do not move."""

from collections import deque
from typing import Generic, TypeVar

Fact = TypeVar("Fact")


class Lagged(Generic[Fact]):
    """What `on_step` brought, in order, until it is due.

    With overlap the record of step s - 1 comes after step s was planned, without it before. So a
    plan that is to be the same either way must use records up to step s - 2 alone."""

    def __init__(self) -> None:
        self._facts: deque[tuple[int, Fact]] = deque()

    def add(self, step: int, fact: Fact) -> None:
        """Keep a fact of a step."""
        self._facts.append((step, fact))

    def due(self, step: int) -> list[Fact]:
        """Facts that every plan of `step` knows; each is given out once."""
        facts = []
        while self._facts and self._facts[0][0] <= step - 2:
            facts.append(self._facts.popleft()[1])
        return facts
