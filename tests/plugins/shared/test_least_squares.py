"""plugins/shared/least_squares.py against solutions known by hand."""

from itertools import product

import numpy as np
import pytest

from plugins.shared.least_squares import non_negative


def test_exact_coefficients_come_back():
    columns = np.random.default_rng(0).uniform(0, 1, (30, 6)) * [1, 1e3, 1e6, 1, 1, 1e9]
    given = np.array([0.01, 2e-6, 0.0, 1.5, 0.0, 3e-12])
    found = non_negative(columns, columns @ given)
    assert found == pytest.approx(given, rel=1e-6, abs=1e-15)


def test_column_that_would_be_negative_is_left_out_and_the_rest_fitted_again():
    """y = 4 - x: the unconstrained slope is -1, so the mean is best."""
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative(columns, np.array([4.0, 3.0, 2.0])) == pytest.approx([3.0, 0.0])


def test_clipping_alone_would_be_worse():
    """Clipped, the unconstrained (5, -1) would leave (5, 0); the best is 13 / 3."""
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert non_negative(columns, np.array([5.0, 4.0, 4.0])) == pytest.approx([13 / 3, 0.0])


def test_nothing_fits_values_below_zero():
    assert non_negative(np.ones((3, 1)), -np.ones(3)).tolist() == [0.0]


def test_best_of_all_subsets_is_found():
    """The optimum is the unconstrained one over some subset of the columns."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        columns, values = rng.normal(size=(12, 5)), rng.normal(size=12)
        best = float(values @ values)
        for chosen in product((False, True), repeat=5):
            own = columns[:, list(chosen)]
            if own.shape[1]:
                found = np.linalg.lstsq(own, values, rcond=None)[0]
                if found.min() >= 0:
                    best = min(best, float(np.square(own @ found - values).sum()))
        found = non_negative(columns, values)
        assert found.min() >= 0
        assert np.square(columns @ found - values).sum() == pytest.approx(best)


def test_many_columns_and_equal_ones_are_no_trouble():
    rng = np.random.default_rng(0)
    columns = rng.uniform(0, 1, (200, 25))
    given = np.where(np.arange(25) % 3, rng.uniform(1, 2, 25), 0.0)
    assert non_negative(columns, columns @ given) == pytest.approx(given, abs=1e-8)
    twice = np.hstack([columns, columns])
    found = non_negative(twice, columns @ given)
    assert twice @ found == pytest.approx(columns @ given)
