"""The metric (P|Q) of an auxiliary basis, factorised: B = W (P|ij) with W^T W = (P|Q)^-1.

By Cholesky (P|Q) = L L^T and W = L^-1. Where the functions are linearly dependent, so that there is no such L, by
eigenvectors (P|Q) v = w v: W = w^-1/2 v^T, without the eigenvalues up to `LINEAR_DEPENDENCE`. Then B has fewer rows
than there are auxiliary functions.

Between the two are metrics that have an L although their smallest eigenvalue is hardly larger than the errors of (P|Q)
by rounding, or smaller. With L, what the nearly dependent functions add to J and K would depend on the last bits, and
in the end whether there is an L does, too. So W is made by eigenvectors as well. PySCF takes L if there is one, so the
user is told by a `Doubt`. Operators that are finite at r = 0 hardly see compact functions, and nearly all auxiliary
bases have such a metric. What compact functions add there is small, with L the errors are not larger than by
eigenvectors, and nobody need be told.
"""

from dataclasses import dataclass

import numpy as np

from md4.errors import BasisError
from md4.support.log import log

# Hartree; the limit of PySCF and of Q-Chem.
LINEAR_DEPENDENCE = 1e-7
# How much larger than its change by rounding the smallest eigenvalue should be.
MARGIN = 100
# Of inverse iteration: steps, which find the smallest eigenvalue to a factor of about 2, and vectors.
STEPS, VECTORS = 3, 4
# Operators that are finite at r = 0.
FINITE = ("erf", "gaussian")
# Functions that a message names.
NAMED = 4


def metric_bytes(naux):
    """Bytes of (P|Q), of its eigenvectors and of LAPACK's copy of it or W, and of LAPACK's workspace."""
    return 24 * naux**2 + 400 * naux


@dataclass(frozen=True)
class Doubt:
    """Of a metric whose smallest eigenvalue is not known to two digits.

    Attributes
    ----------
    smallest : float
        The eigenvalue, about, in Hartree.
    rounding : float
        By how much rounding changes eigenvalues, about.
    functions : tuple of int
        Auxiliary functions with the largest coefficients in its eigenvector.
    """

    smallest: float
    rounding: float
    functions: tuple

    def text(self, labels=None):
        """What to tell the user; `labels` are the names of all auxiliary functions."""
        names = ", ".join(repr(n if labels is None else " ".join(labels[n].split())) for n in self.functions)
        return (
            "the auxiliary functions are linearly dependent within rounding, or nearly so: the smallest eigenvalue of "
            f"their metric is about {self.smallest:.0e}, and rounding changes it by up to {self.rounding:.0e}. So its "
            f"eigenvectors with eigenvalues up to {LINEAR_DEPENDENCE:g} are left out, and J and K may differ from "
            "those of PySCF; leave out functions that nearly coincide with others, or are nearly made up of others. "
            f"The largest coefficients are those of {names}."
        )


def largest_element(array):
    """Largest absolute value, as a float."""
    return max(float(array.max()), -float(array.min()))


class Metric:
    """W of an auxiliary basis.

    Parameters
    ----------
    matrix : array, shape (naux, naux)
        (P|Q) on the device.
    algebra : md4.backends.Algebra
    kind : str
        That of the operator.

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
    doubt : Doubt or None
        Of an L that was not taken; None for an operator that is finite at r = 0.

    Raises
    ------
    BasisError
        All functions are linearly dependent: no eigenvalue is left.
    """

    def __init__(self, matrix, algebra, kind="coulomb"):
        self.algebra, self.naux, self.vectors, self.doubt = algebra, len(matrix), None, None
        self.lower = algebra.cholesky(matrix)
        if self.lower is not None:
            self.solve = algebra.lower_solver(self.lower)
            if kind not in FINITE:
                largest = matrix.reshape(-1)[:: self.naux + 1].max()
                self._look_for_doubt(float(np.finfo(float).eps * self.naux * largest))
        if self.lower is None or self.doubt is not None:
            self._take_eigenvectors(matrix)
        self.size = self.naux if self.vectors is None else len(self.vectors)

    def _take_eigenvectors(self, matrix):
        """Makes `vectors`; an L, which nobody will use, goes first."""
        algebra, self.lower, self.solve = self.algebra, None, None
        values, vectors = algebra.eigh(matrix)
        kept = algebra.fetch(values) > LINEAR_DEPENDENCE
        if not kept.any():
            raise BasisError(
                f"the metric of {self.naux} auxiliary functions has no eigenvalue above {LINEAR_DEPENDENCE:g}; use "
                "another auxiliary basis."
            )
        first = int(np.argmax(kept))  # eigenvalues ascend
        self.vectors = algebra.empty((self.naux - first, self.naux))
        self.vectors[...] = vectors[:, first:].T
        self.vectors /= algebra.xp.sqrt(values[first:, None])
        log.debug("the metric is singular: %d eigenvectors of %d stay", *self.vectors.shape)

    def _look_for_doubt(self, rounding):
        """Sets `doubt` by the smallest eigenvalue of L L^T, from inverse iteration, and its change by rounding."""
        vectors = self.algebra.send(np.random.default_rng(0).normal(size=(self.naux, VECTORS)))
        for _ in range(STEPS):
            before = largest_element(vectors)
            vectors = self.solve(self.solve(vectors), transposed=True)
            smallest = before / largest_element(vectors)
        if smallest < MARGIN * rounding:
            sizes = abs(self.algebra.fetch(vectors)).max(axis=1)
            self.doubt = Doubt(smallest, rounding, tuple(np.argsort(-sizes, kind="stable")[:NAMED].tolist()))
            log.warning(self.doubt.text())

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
            made = self.algebra.xp.empty((self.size, array[:, these].shape[1]))
            array[: self.size, these] = self.algebra.product(self.vectors, array[:, these], made)
        return array[: self.size]

    def apply_transposed(self, array):
        """W^T times a C-contiguous array (size, n), which may be overwritten; shape (naux, n)."""
        if self.vectors is None:
            return self.solve(array, transposed=True)
        made = self.algebra.xp.empty((self.naux, array.shape[1]))
        return self.algebra.product(self.vectors.T, array, made)


class LeftOut(Metric):
    """In place of W: the eigenvectors that a `Metric` leaves out, as rows; for the gradient.

    Parameters
    ----------
    matrix : array, shape (naux, naux)
        As for `Metric`.
    metric : Metric
        By eigenvectors.

    Attributes
    ----------
    values : array, shape (naux,)
        All eigenvalues, first those that are left out.
    """

    def __init__(self, matrix, metric):
        self.algebra, self.naux, self.size = metric.algebra, metric.naux, metric.naux - metric.size
        self.values, vectors = self.algebra.eigh(matrix)
        self.vectors = self.algebra.xp.ascontiguousarray(vectors[:, : self.size].T)
