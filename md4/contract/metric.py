"""The metric (P|Q) of an auxiliary basis, factorised: B = W (P|ij) with W^T W = (P|Q)^-1.

By Cholesky (P|Q) = L L^T and W = L^-1. Where the functions are linearly dependent, so that there is no such L, by
eigenvectors (P|Q) v = w v: W = w^-1/2 v^T, without the eigenvalues up to `LINEAR_DEPENDENCE`. Then B has fewer rows
than there are auxiliary functions.
"""

import numpy as np

from md4.errors import BasisError
from md4.support.log import log

# Hartree; the limit of PySCF and of Q-Chem.
LINEAR_DEPENDENCE = 1e-7


class Metric:
    """W of an auxiliary basis.

    Parameters
    ----------
    matrix : array, shape (naux, naux)
        (P|Q) on the device.
    algebra : md4.backends.Algebra

    Attributes
    ----------
    naux : int
        Number of auxiliary functions P.
    size : int
        Number of rows of B.
    lower : array, shape (naux, naux), or None
        L, if there is one.
    vectors : array, shape (size, naux), or None
        W where there is no L.

    Raises
    ------
    BasisError
        All functions are linearly dependent: no eigenvalue is left.
    """

    def __init__(self, matrix, algebra):
        self.algebra, self.naux, self.vectors = algebra, len(matrix), None
        self.lower = algebra.cholesky(matrix)
        if self.lower is not None:
            self.solve = algebra.lower_solver(self.lower)
        else:
            values, vectors = algebra.eigh(matrix)
            kept = algebra.fetch(values) > LINEAR_DEPENDENCE
            if not kept.any():
                raise BasisError(
                    f"the metric of {self.naux} auxiliary functions has no eigenvalue above {LINEAR_DEPENDENCE:g}; use "
                    "another auxiliary basis."
                )
            first = int(np.argmax(kept))  # eigenvalues ascend
            self.vectors = algebra.empty((self.naux - first, self.naux))
            self.vectors[...] = (vectors[:, first:] / algebra.xp.sqrt(values[first:])).T
            log.info("the metric is singular: %d eigenvectors of %d stay", *self.vectors.shape)
        self.size = self.naux if self.vectors is None else len(self.vectors)

    @property
    def how(self):
        """For messages."""
        return "Cholesky" if self.vectors is None else "eigenvectors"

    def apply(self, array):
        """W times a C-contiguous array (naux, n), which is overwritten; shape (size, n)."""
        if self.vectors is None:
            return self.solve(array)
        step = max(1, self.algebra.chunk_bytes // (8 * self.naux))
        for first in range(0, array.shape[1], step):
            these = slice(first, first + step)
            array[: self.size, these] = self.algebra.xp.matmul(self.vectors, array[:, these])
        return array[: self.size]

    def apply_transposed(self, array):
        """W^T times a C-contiguous array (size, n), which may be overwritten; shape (naux, n)."""
        if self.vectors is None:
            return self.solve(array, transposed=True)
        return self.algebra.xp.matmul(self.vectors.T, array)
