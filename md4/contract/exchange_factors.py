"""Density matrices as products of few columns, and the exchange matrix of density fitting that is made of them.

    D = sum_o s_o L_o R_o^T ,   s_o = 1 or -1 ,       K = sum_Qo s_o (B_Q L_o) (B_Q R_o)^T

L = R are the occupied orbitals times the roots of their occupations where these are known, and the eigenvectors of a
symmetric matrix where not. Singular vectors are L and R of any other matrix: a transition density has few of them.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

# Largest deviation of a symmetric matrix from its transposed one, relative to its largest element.
SYMMETRY_TOLERANCE = 1e-14
# Rows of a symmetric K that one product makes at least, in tiles. Fewer save more of what is above the diagonal, but
# products of narrow matrices are slower. Libraries make a product in tiles, of which panels have whole ones.
PANEL, TILE = 3, 128


@dataclass
class Factors:
    """L, R and s of a density matrix.

    Attributes
    ----------
    left, right : array, shape (nao, n)
        On the device, columns are contiguous, as products read them fastest; the same object for a symmetric matrix.
    negative : int
        So many columns, the first ones, have s = -1.
    """

    left: Any
    right: Any
    negative: int = 0

    @property
    def symmetric(self):
        return self.right is self.left

    @property
    def rank(self):
        return self.left.shape[1]

    @property
    def sides(self):
        """The different ones of L and R."""
        return [self.left] if self.symmetric else [self.left, self.right]

    def __getitem__(self, piece):
        """The same of the columns of a slice."""
        left = self.left[:, piece]
        right = left if self.symmetric else self.right[:, piece]
        first, last, _ = piece.indices(self.rank)
        return Factors(left, right, max(0, min(self.negative, last) - first))


def occupied(density, coefficients, occupations, algebra):
    """C n^1/2 of the occupied orbitals, shape (nao, nocc); None if C n C^T is not the density, to rounding.

    It may have been changed since. Two sums over o of c_io n_o c_jo differ by rounding at most by 2 (nocc + 4) units of
    (sum_o c_io^2 n_o)^1/2 (sum_o c_jo^2 n_o)^1/2, in whatever order they are made.
    """
    if not np.isrealobj(coefficients) or coefficients.shape != (len(density), len(occupations)):
        return None
    filled = occupations > 0
    found = algebra.send(np.ascontiguousarray((coefficients[:, filled] * np.sqrt(occupations[filled])).T)).T
    made = algebra.xp.matmul(found, found.T)
    size = algebra.xp.sqrt(made.diagonal() * (2 * (found.shape[1] + 4) * np.finfo(float).eps))
    made -= density
    return found if bool((abs(made) <= size[:, None] * size).all()) else None


def is_symmetric(density, largest):
    """Whether a matrix is, but for rounding. Callers of PySCF say so of matrices that are not."""
    return float(abs(density - density.T).max()) <= SYMMETRY_TOLERANCE * largest


def factors(density, algebra, orbitals, largest):
    """The `Factors` of a density matrix.

    Parameters
    ----------
    density : array, shape (nao, nao)
        On the device.
    algebra : md4.backends.Algebra
    orbitals : (coefficients, occupations) or None
        NumPy arrays of the shapes (nao, nmo) and (nmo,).
    largest : float
        The largest element of the density.
    """
    left = None if orbitals is None else occupied(density, *orbitals, algebra)
    if left is not None:
        return Factors(left, left)
    xp, small = algebra.xp, len(density) * np.finfo(float).eps
    if not is_symmetric(density, largest):
        left, values, right = algebra.svd(density)
        kept = int((values > small * values.max()).sum())
        return Factors(xp.ascontiguousarray((left[:, :kept] * values[:kept]).T).T, xp.ascontiguousarray(right[:kept]).T)
    values, vectors = algebra.eigh(density)
    kept = abs(values) > small * abs(values).max()
    values = values[kept]
    left = xp.ascontiguousarray((vectors[:, kept] * xp.sqrt(abs(values))).T).T
    return Factors(left, left, int((values < 0).sum()))  # they ascend


def half_of_rows(algebra, rows, places, block, vectors, out):
    """As `half_transformed` of the matrices of rows of pairs of AOs, which are `block`; None if `takes_rows`."""
    if block is not None:
        return half_transformed(algebra, block, vectors, out)
    shape = vectors.shape[1], len(rows), len(places)
    made = out[: prod(shape)].reshape(shape)
    algebra.half_transform(rows, places, vectors, made.transpose(1, 2, 0))
    return made.reshape(-1, len(places))


def takes_rows(algebra, nao, sides):
    """Whether half-transformed integrals of all L are made of rows without matrices."""
    return all(algebra.takes_rows(nao, side.shape[1]) for side in sides)


def half_transformed(algebra, block, vectors, out):
    """X[o, Q, i] = sum_j L[j, o] B_Q[i, j], shape (rank * rows, n_i), in memory of `out`, a row of numbers.

    Parameters
    ----------
    algebra : md4.backends.Algebra
    block : array, shape (rows, n_i, n_j)
    vectors : array, shape (n_j, rank)
    """
    (rows, n_i, n_j), rank = block.shape, vectors.shape[1]
    made = out[: rank * rows * n_i].reshape(rank, rows * n_i)
    return algebra.product(vectors.T, block.reshape(rows * n_i, n_j).T, made).reshape(rank * rows, n_i)


def add_exchange(algebra, k, left, right, factor=1.0):
    """Adds factor X^T Y to K, shape (nao, nao); of X and Y, shape (n, nao).

    Where both are the same array, what is above the diagonal is left out in part; `complete_exchange` adds it.
    """
    if right is not left:
        algebra.product(left.T, right, k, factor, add=True)
        return
    for first, last in panels(len(k)):
        algebra.product(left[:, first:last].T, left[:, :last], k[first:last, :last], factor, add=True)


def complete_exchange(k):
    """Copies what `add_exchange` left out of a symmetric K from below its diagonal."""
    for first, last in panels(len(k)):
        k[first:last, last:] = k[last:, first:last].T


def panels(nao):
    """Ranges of rows of K."""
    tiles = -(-nao // TILE)
    count = max(1, tiles // PANEL)
    return list(pairwise(min(nao, tiles * n // count * TILE) for n in range(count + 1)))
