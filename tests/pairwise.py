"""Few combinations instead of all, where dimensions are independent."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of the axes' values in which any two values of different axes meet at least
    once: greedily those that show the most new pairs. For small axes: it looks at the product."""

    def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(combinations(enumerate(row), 2))

    rows = list(product(*axes))
    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
