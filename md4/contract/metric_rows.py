"""Some rows of W, B = W (P|ij), for workers that divide the rows of B; W is that of `md4.contract.metric`.

By Cholesky W = L^-1. All rows of B by forward substitution need each other. So a worker takes its rows of L^-1 as a
matrix, unless the auxiliary functions are nearly dependent: then this would lose digits, and it substitutes.

The product is nearly as exact as forward substitution if L^-1 was found row by row, from W L = 1: then W L = 1 + E with
a small E, and W (P|ij) has the error E B (Du Croz and Higham, IMA J. Numer. Anal. 12 (1992) 1). L^-1 from L W = 1 would
be far worse. But errors of B by substitution are those of a slightly different metric, to which energies are
insensitive. Those of the product are not, and grow with the elements of W.
"""

from dataclasses import dataclass, field

import numpy as np

from md4.contract.fitting_stores import WORK_SHARE, zeros
from md4.contract.metric import LINEAR_DEPENDENCE, Doubt, Metric, largest_element

# Largest element of L^-1 (Hartree^-1/2) with which it is taken as a matrix. W by eigenvectors has no larger ones.
LARGEST = LINEAR_DEPENDENCE**-0.5
# A worker multiplies its rows of W in so many blocks, each without the columns in which it is zero.
BLOCKS = 8


@dataclass
class Inverse:
    """W of the whole metric on the host, or what it is made of.

    Attributes
    ----------
    matrix : ndarray, shape (size, naux)
        W; L for substitution.
    how : str
        As that of the `Metric`. By Cholesky, W is a lower triangle.
    by_substitution : bool
    doubt : Doubt or None
        As that of the `Metric`.
    """

    matrix: np.ndarray = field(repr=False)
    how: str
    by_substitution: bool
    doubt: Doubt | None = None

    @property
    def size(self):
        return len(self.matrix)

    def rows(self, piece, algebra):
        """Rows of W on a device, in place of a `Metric`."""
        return (Substitution if self.by_substitution else Weights)(self, piece, algebra)


def inverse(matrix, algebra, kind="coulomb"):
    """The `Inverse` of a metric (P|Q) on the device; errors and `kind` as for `Metric`."""
    metric = Metric(matrix, algebra, kind)
    del matrix  # which frees its memory, unless the caller keeps it
    if metric.vectors is not None:
        return Inverse(algebra.fetch(metric.vectors), metric.how, by_substitution=False, doubt=metric.doubt)
    unit = zeros(algebra, (metric.size, metric.size))
    unit.reshape(-1)[:: metric.size + 1] = 1.0
    found = metric.apply_transposed(unit)  # W^T, each row of W from W L = 1
    if largest_element(found) > LARGEST:
        return Inverse(algebra.fetch(metric.lower), metric.how, by_substitution=True)
    return Inverse(np.ascontiguousarray(algebra.fetch(found).T), metric.how, by_substitution=False)


class Rows:
    """Rows of W with the attributes and methods of a `Metric`.

    Attributes
    ----------
    numbers : range
        Which rows.
    naux, size, how, doubt
        As those of a `Metric`, of these rows.
    """

    def __init__(self, inverse, piece, algebra):
        self.numbers, self.algebra = range(inverse.size)[piece], algebra
        self.how, self.doubt = inverse.how, inverse.doubt
        self.size, self.naux = len(self.numbers), inverse.matrix.shape[1]

    def copied(self, matrix):
        """A copy on the device of a part of a matrix."""
        copy = self.algebra.empty(matrix.shape)
        copy[...] = self.algebra.send(np.ascontiguousarray(matrix))
        return copy

    def steps(self, columns):
        """Slices of columns of which there is memory for the rows of B, and a copy of (P|ij)."""
        most = min(self.algebra.block_bytes, WORK_SHARE * self.algebra.memory_left())
        step = max(1, int(most) // (8 * (self.naux + self.size)))
        return [slice(first, min(first + step, columns)) for first in range(0, columns, step)]


class Weights(Rows):
    """Rows of W as a matrix.

    Attributes
    ----------
    blocks : list of (int, array)
        Number of the first row, and the rows up to the last column that is not zero.
    """

    def __init__(self, inverse, piece, algebra):
        super().__init__(inverse, piece, algebra)
        self.blocks, step = [], max(1, -(-self.size // BLOCKS))
        for first in range(0, self.size, step):
            these = self.numbers[first : first + step]
            last = these[-1] + 1 if self.how == "Cholesky" else self.naux
            self.blocks.append((first, self.copied(inverse.matrix[these.start : these.stop : these.step, :last])))

    def apply(self, array):
        """As `Metric.apply`."""
        for these in self.steps(array.shape[1]):
            part, made = array[:, these], self.algebra.empty((self.size, these.stop - these.start))
            for first, block in self.blocks:
                self.algebra.product(block, part[: block.shape[1]], made[first : first + len(block)])
            array[: self.size, these] = made
        return array[: self.size]

    def apply_transposed(self, array):
        """As `Metric.apply_transposed`."""
        made = zeros(self.algebra, (self.naux, array.shape[1]))
        for first, block in self.blocks:
            self.algebra.product(block.T, array[first : first + len(block)], made[: block.shape[1]], add=True)
        return made


class Substitution(Rows):
    """Rows of L^-1, by forward substitution through all rows up to the last one.

    Attributes
    ----------
    lower : array
        L up to this row.
    """

    def __init__(self, inverse, piece, algebra):
        super().__init__(inverse, piece, algebra)
        last = self.numbers[-1] + 1 if self.size else 0
        self.lower = self.copied(inverse.matrix[:last, :last])
        self.solve = algebra.lower_solver(self.lower) if last else None

    def apply(self, array):
        """As `Metric.apply`."""
        if self.size == 0:
            return array[:0]
        solved = self.solve(array[: len(self.lower)])
        if self.numbers == range(self.size):
            return solved
        for these in self.steps(array.shape[1]):
            made = self.algebra.empty((self.size, these.stop - these.start))
            made[...] = solved[self.numbers.start : self.numbers.stop : self.numbers.step, these]
            array[: self.size, these] = made
        return array[: self.size]

    def apply_transposed(self, array):
        """As `Metric.apply_transposed`; of all rows."""
        return self.solve(array, transposed=True)
