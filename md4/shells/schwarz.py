"""Schwarz bounds of shell pairs from the diagonal integrals (ab|ab); see `md4.contract.screening`."""

import numpy as np


def row_norms(diagonal):
    """R_ab, shape (npair,), from the diagonals (ab|ab), shape (npair, na, nb); negative elements count as zero."""
    positive = np.maximum(diagonal, 0.0)
    return np.sqrt(np.maximum(positive.sum(axis=2).max(axis=1), positive.sum(axis=1).max(axis=1)))


def larger(x, y):
    """The maximum of two numbers; NaN propagates (device function)."""
    return x if x >= y or x != x else y  # noqa: PLR0124 only NaN differs from itself
