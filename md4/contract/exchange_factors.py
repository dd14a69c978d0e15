"""Density matrices as products of few columns, and the exchange matrix of density fitting that is made of them.

    D = sum_o s_o L_o R_o^T ,   s_o = 1 or -1 ,       K = sum_Qo s_o (B_Q L_o) (B_Q R_o)^T

L = R are the occupied orbitals times the roots of their occupations where these are known, and the eigenvectors of a
symmetric matrix where not. Singular vectors are L and R of any other matrix: a transition density has few of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

# Largest deviation of a density from its own orbitals, relative to its largest element. Orbitals that do not fit are
# left alone: the density may have been changed since.
ORBITAL_TOLERANCE = 1e-10
# The same of a symmetric matrix from its transposed one.
SYMMETRY_TOLERANCE = 1e-14


@dataclass
class Factors:
    """L, R and s of a density matrix.

    Attributes
    ----------
    left, right : array, shape (nao, n)
        On the device; the same object for a symmetric matrix.
    signs : array, shape (n,), or None
        On the device; None where all are 1.
    """

    left: Any
    right: Any
    signs: Any = None

    @property
    def symmetric(self):
        return self.right is self.left

    @property
    def rank(self):
        return self.left.shape[1]

    def __getitem__(self, piece):
        """The same of some of the columns."""
        left = self.left[:, piece]
        right = left if self.symmetric else self.right[:, piece]
        return Factors(left, right, None if self.signs is None else self.signs[piece])


def occupied(density, coefficients, occupations, algebra):
    """C n^1/2 of the occupied orbitals, shape (nao, nocc); None if these are not the orbitals of the density."""
    if not np.isrealobj(coefficients) or coefficients.shape != (len(density), len(occupations)):
        return None
    filled = occupations > 0
    found = algebra.send(np.ascontiguousarray(coefficients[:, filled] * np.sqrt(occupations[filled])))
    deviation = abs(algebra.xp.matmul(found, found.T) - density).max()
    return found if float(deviation) <= ORBITAL_TOLERANCE * float(abs(density).max()) else None


def is_symmetric(density):
    """Whether a matrix is, but for rounding. Callers of PySCF say so of matrices that are not."""
    return float(abs(density - density.T).max()) <= SYMMETRY_TOLERANCE * float(abs(density).max())


def factors(density, algebra, orbitals=None):
    """The `Factors` of a density matrix.

    Parameters
    ----------
    density : array, shape (nao, nao)
        On the device.
    algebra : md4.backends.Algebra
    orbitals : (coefficients, occupations), optional
        NumPy arrays of the shapes (nao, nmo) and (nmo,).
    """
    left = None if orbitals is None else occupied(density, *orbitals, algebra)
    if left is not None:
        return Factors(left, left)
    xp, small = algebra.xp, len(density) * np.finfo(float).eps
    if not is_symmetric(density):
        left, values, right = algebra.svd(density)
        kept = int((values > small * values.max()).sum())
        return Factors(left[:, :kept] * values[:kept], xp.ascontiguousarray(right[:kept].T))
    values, vectors = algebra.eigh(density)
    kept = abs(values) > small * abs(values).max()
    values = values[kept]
    left = vectors[:, kept] * xp.sqrt(abs(values))
    return Factors(left, left, None if bool((values > 0).all()) else xp.sign(values))


def half_transformed(xp, block, f, work):
    """B_Q L and B_Q R with the signs, both as (nao, Q o), in memory of `work`; one array twice where they are the same.

    Parameters
    ----------
    block : array, shape (rows, nao, nao)
    f : Factors
    work : list of arrays
        Four of rows * nao * rank numbers at least.
    """
    rows, nao, _ = block.shape
    size, shape = rows * nao * f.rank, (nao, rows, f.rank)

    def one(vectors, n):
        made = work[n][:size].reshape(rows * nao, f.rank)
        xp.matmul(block.reshape(rows * nao, nao), vectors, out=made)
        turned = work[n + 1][:size].reshape(shape)
        turned[...] = made.reshape(rows, nao, f.rank).transpose(1, 0, 2)
        return turned

    left = one(f.left, 0)
    right = left if f.symmetric else one(f.right, 2)
    if f.signs is not None:
        right = xp.multiply(left, f.signs, out=work[0][:size].reshape(shape))
    return left.reshape(nao, -1), right.reshape(nao, -1)


def add_exchange(k, left, right, xp):
    """Adds left right^T to K."""
    k += xp.matmul(left, right.T)
