"""Bounds of shell pairs from diagonal integrals."""

import numpy as np
import pytest

from md4.shells.schwarz import GradientBounds, row_norms


def test_row_norms():
    """The largest root of a sum over a row or a column; what is negative by rounding counts as zero."""
    diagonal = np.random.default_rng(0).uniform(0, 1, (4, 3, 5))
    diagonal[0, 1, 2] = -1e-3
    found = row_norms(diagonal)
    for norm, block in zip(found, np.maximum(diagonal, 0)):
        assert norm == pytest.approx(np.sqrt(max(*block.sum(axis=0), *block.sum(axis=1))))
        assert norm <= np.sqrt(block.sum()) <= np.sqrt(3) * norm


def test_gradient_bounds():
    """f_ab is 1 for the pair of a shell with itself and else 2; a derivative counts twice on one centre."""
    shells = np.array([[0, 0], [0, 1], [2, 0], [1, 2]])
    centres = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 2.0, 1.0]])
    made = GradientBounds(shells, centres, np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 40.0]))
    np.testing.assert_allclose(made.own, [1.0, 4.0, 6.0, 8.0])
    np.testing.assert_allclose(made.derivative, [20.0, 80.0, 60.0, 80.0])
