"""Least squares with no coefficient below 0.

Source: C. L. Lawson and R. J. Hanson, Solving Least Squares Problems, 1974, chapter 23."""

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
SLACK = 1e-10  # of a gradient, beside the values' size
ROUNDS = 30  # for each column


def non_negative(columns: Float, values: Float) -> Float:
    """The x >= 0 that minimises |columns x - values|; columns [n, k], values [n].

    Columns are taken in one by one, the steepest first; where one in use would turn negative, the
    step ends at 0 and it is left out."""
    sizes = np.sqrt(np.square(columns).sum(axis=0))
    sizes = np.where(sizes > 0, sizes, 1.0)
    scaled, num = columns / sizes, columns.shape[1]
    found, used = np.zeros(num), np.zeros(num, np.bool_)
    least = SLACK * float(np.sqrt(values @ values))
    for _ in range(ROUNDS * num):
        steep = np.where(used, -np.inf, scaled.T @ (values - scaled @ found))
        if steep.max(initial=-np.inf) <= least:
            break
        used[int(steep.argmax())] = True
        found, used = _settled(scaled, values, found, used)
    result: Float = found / sizes
    return result


def _settled(
    columns: Float, values: Float, found: Float, used: NDArray[np.bool_]
) -> tuple[Float, NDArray[np.bool_]]:
    """The best over the columns in use, those that would be negative left out."""
    used = used.copy()
    while used.any():
        best = np.zeros_like(found)
        best[used] = np.linalg.lstsq(columns[:, used], values, rcond=1e-10)[0]
        below = used & (best <= 0)
        if not below.any():
            return best, used
        share = float((found[below] / (found[below] - best[below] + 1e-300)).min())
        found = np.maximum(found + share * (best - found), 0.0)
        used &= ~(below & (found <= 1e-15))
        found[~used] = 0.0
    return np.zeros_like(found), used
