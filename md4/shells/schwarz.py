"""Schwarz bounds of shell pairs from the diagonal integrals (ab|ab), and norms of densities for bounds of quartets.

See `md4.contract.screening`.
"""

import numpy as np

# Of a pair with more primitive pairs than this, the bound of a derivative is the sum of the norms of so many of these
# at a time, which is not less than the norm of their sum.
TOGETHER = 16
# Rounding error of (ab|ab) in units of that with the moduli of all coefficients, with a wide margin.
ROUNDING = 1e-13
# Primitive pairs from whose number on rounding errors grow.
FEW_PRIMITIVES = 32


def term_growth(nprims):
    """By what the rounding error of a sum over so many primitive pairs is larger than that of a few."""
    return np.sqrt(np.maximum(1.0, nprims / FEW_PRIMITIVES))


def row_norms(diagonal):
    """R_ab, shape (npair,), from the diagonals (ab|ab), shape (npair, na, nb); negative elements count as zero."""
    positive = np.maximum(diagonal, 0.0)
    return np.sqrt(np.maximum(positive.sum(axis=2).max(axis=1), positive.sum(axis=1).max(axis=1)))


def block_norms(basis, densities):
    """|D_ab| of the blocks of each density, shape (n, nshell, nshell)."""
    first = basis.ao_loc[:-1]
    with np.errstate(over="ignore"):
        return np.sqrt(np.add.reduceat(np.add.reduceat(densities**2, first, axis=2), first, axis=1))


def exchange_norms(norms, pairs):
    """The largest |D_jk| of each shell j with all shells k of some pairs, shape (nshell,), of `block_norms`."""
    return norms[:, np.unique(pairs)].max(axis=1, initial=0.0)


def larger(x, y):
    """The maximum of two numbers; NaN propagates (device function)."""
    return x if x >= y or x != x else y  # noqa: PLR0124 only NaN differs from itself


class GradientBounds:
    """Bounds of shell pairs, or of primitive pairs, for gradients; see the page "Theory".

    Parameters
    ----------
    shells : ndarray, shape (npair, 2)
        Those of each pair.
    centres : ndarray, shape (nshell, 3)
    norms, largest : ndarray, shape (npair,)
        Bounds of (sum_ab (ab|ab))^1/2 of each pair, and of its largest derivative.

    Attributes
    ----------
    factor : ndarray, shape (npair,)
        f_ab.
    largest : ndarray
        As given.
    own, derivative : ndarray, shape (npair,)
        `norms` times f_ab, and `largest` times f_ab. Both derivatives of a pair add to the same force where its shells
        have the same centre, so that bound is twice as large there.
    """

    def __init__(self, shells, centres, norms, largest):
        self.factor = factor = np.where(shells[:, 0] == shells[:, 1], 1.0, 2.0)
        a, b = centres[shells.T]
        self.own, self.largest = factor * norms, largest
        self.derivative = np.where((a == b).all(axis=1), 2.0, 1.0) * factor * largest
