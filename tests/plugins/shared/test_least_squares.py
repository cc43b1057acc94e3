"""plugins/shared/least_squares.py against solutions known by hand."""

import numpy as np
import pytest

from core.errors import ConfigError
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


def test_too_many_columns_are_refused():
    with pytest.raises(ConfigError, match="columns must be <= 10, got 11"):
        non_negative(np.ones((2, 11)), np.ones(2))
