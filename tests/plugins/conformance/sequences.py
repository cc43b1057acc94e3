"""Random sequences of calls, and of one that breaks a rule the part that still does."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.plugins.conformance.rules import BrokenRuleError

Steps = list[Any]
LENGTH = 12, 40


def hold_for_all(
    run: Callable[[Steps], None], draw: Callable[[np.random.Generator], Any], count: int
) -> None:
    """Call `run` with `count` sequences of steps that `draw` makes, always the same ones. The
    BrokenRuleError of the first bad one is that of its shortest part found."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        steps = [draw(rng) for _ in range(rng.integers(*LENGTH))]
        try:
            run(steps)
        except BrokenRuleError:
            run(_shortened(run, steps))
            raise  # the part no longer breaks the rule: it depends on more than the steps


def _shortened(run: Callable[[Steps], None], steps: Steps) -> Steps:
    size = len(steps) // 2
    while size:
        begin = 0
        while begin < len(steps):
            rest = steps[:begin] + steps[begin + size :]
            if _breaks(run, rest):
                steps = rest
            else:
                begin += size
        size //= 2
    return steps


def _breaks(run: Callable[[Steps], None], steps: Steps) -> bool:
    try:
        run(steps)
    except BrokenRuleError:
        return True
    return False
