"""The experiment's tables, on a few requests."""

import numpy as np

from core.request import Request
from experiments.cache_bounds.replay import uses_of
from experiments.cache_bounds.table import EVICTORS, bounds_table, policies_table
from plugins.shared.cache_bounds import prefix_trace, trace_bounds


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_tables_hold_every_pair_beside_the_bounds():
    """Prompts of the blocks 1 2, 3 4, 1 2, 3 4: room for all four finds the second half."""
    prompts = [[1, 2], [3, 4], [1, 2], [3, 4]]
    requests = [Request(str(i), np.array(p, np.int32)) for i, p in enumerate(prompts)]
    trace = prefix_trace(uses_of(requests))
    bounds = [trace_bounds(trace, capacity) for capacity in (2, 4)]
    _, _, *rows = cells(policies_table(requests, trace, bounds))
    assert len(rows) == 4 * len(EVICTORS) + 2
    rates = {(admission, evictor): found for admission, evictor, *found in rows}
    assert rates["admit_all", "lru"] == ["0.0000", "0.5000"]
    assert rates["second_hit", "lru"] == ["0.0000", "0.0000"]  # the second sighting is the last
    assert rates["min_length", "lru"] == ["0.0000", "0.0000"]
    assert rates["", "MIN"] == ["0.2500", "0.5000"]
    _, _, small, large = cells(bounds_table(bounds))
    assert small == ["2", "0.0000", "0.2500", "0.2500", "0.5000", "0.2500", "0.0000", "0.2500"]
    assert large[1:5] == ["0.5000"] * 4
