"""Least squares with no coefficient below 0, for a handful of columns."""

from itertools import product

import numpy as np
from numpy.typing import NDArray

from core.config import require

Float = NDArray[np.float64]
MOST = 10  # columns: 2^10 problems are solved


def non_negative(columns: Float, values: Float) -> Float:
    """The x >= 0 that minimises |columns x - values|; columns [n, k], values [n].

    Exact: the optimum is the unconstrained one over some subset of the columns, and all subsets are
    tried. Raises ConfigError for more than 10 columns."""
    num = columns.shape[1]
    require(num <= MOST, "columns", f"<= {MOST}", num)
    sizes = np.sqrt(np.square(columns).sum(axis=0))
    scaled = columns / np.where(sizes > 0, sizes, 1.0)
    best, least = np.zeros(num), float(values @ values)
    for chosen in product((False, True), repeat=num):
        used = np.flatnonzero(chosen)
        if not len(used):
            continue
        found = np.linalg.lstsq(scaled[:, used], values, rcond=1e-10)[0]
        cost = float(np.square(scaled[:, used] @ found - values).sum())
        if found.min() >= 0 and cost < least:
            best, least = np.zeros(num), cost
            best[used] = found
    result: Float = best / np.where(sizes > 0, sizes, 1.0)
    return result
