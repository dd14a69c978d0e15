"""Square matrices plus their transposed ones, and other work on all elements of matrices, by several threads."""

import numpy as np

from md4.cpu.compile import Loop
from md4.cpu.threads import in_threads
from md4.support.locks import once

# Rows and columns that are read together: rows of one matrix and columns of the other stay in a cache.
BLOCK = 32
# Rows of a matrix that a thread takes at once.
ROWS = 4 * BLOCK


def add_transposed(matrix, other, sign, factor, in_place, first, end, out, sizes):
    """out = factor (matrix + sign * other^T) for the rows from `first` on.

    `in_place` says that the three are one matrix. Then the rows are done from the diagonal on, and the columns below
    with them. The `sizes` become the largest |M_ij| that was read, and the largest |M_ij - O_ji|.
    """
    nao, largest, difference = len(matrix), 0.0, 0.0
    for top in range(first, end, BLOCK):
        for left in range(top if in_place else 0, nao, BLOCK):
            for i in range(top, min(top + BLOCK, end)):
                for j in range(max(left, i) if in_place else left, min(left + BLOCK, nao)):
                    one, two = matrix[i, j], other[j, i]
                    largest, difference = max(largest, abs(one)), max(difference, abs(one - two))
                    value = factor * (one + sign * two)
                    out[i, j] = value
                    if in_place:
                        out[j, i] = sign * value
    sizes[0], sizes[1] = largest, difference


transposed_sum = once(lambda: Loop(add_transposed))


def plus_transposed(matrices, others=None, sign=1, out=None):
    """`matrices` + sign times the transposed `others`, which are themselves by default; shapes (n, nao, nao).

    The result is written to `out`, which may be `matrices` if there are no `others`.
    """
    others, out = matrices if others is None else others, np.empty_like(matrices) if out is None else out
    sums_with_transposed(matrices, others, sign, 1.0, out)
    return out


def symmetric_parts(matrices):
    """((M + M^T) / 2 of matrices, shape (n, nao, nao); the largest |M_ij|, and the largest |M_ij - M_ji|)."""
    out = np.empty_like(matrices)
    return out, *sums_with_transposed(matrices, matrices, 1, 0.5, out)


def sums_with_transposed(matrices, others, sign, factor, out):
    """`add_transposed` of all rows, by several threads; returns the `sizes`."""
    count, nao = matrices.shape[:2]
    pieces, in_place = -(-nao // ROWS), out is matrices
    sizes = np.empty((count * pieces, 2))

    def rows(n):
        k, piece = divmod(n, pieces)
        ends = piece * ROWS, min((piece + 1) * ROWS, nao)
        transposed_sum()(matrices[k], others[k], float(sign), factor, in_place, *ends, out[k], sizes[n])

    in_threads(count * pieces, rows, matrices.size)
    return sizes.max(axis=0).tolist()


def by_elements(function, *arrays, out=None):
    """A function of NumPy for matrices of one shape (..., nao, nao), element by element; into `out`, or a new array."""
    out = np.empty_like(arrays[0], order="C") if out is None else out

    def rows(n):
        *given, result = (array[..., n * ROWS : (n + 1) * ROWS, :] for array in (*arrays, out))
        function(*given, out=result)

    in_threads(-(-out.shape[-2] // ROWS), rows, out.size)
    return out


def all_finite(matrices):
    """Whether all elements of matrices, shape (..., nao, nao), are finite numbers."""
    finite = []

    def rows(n):
        finite.append(bool(np.isfinite(matrices[..., n * ROWS : (n + 1) * ROWS, :]).all()))

    in_threads(-(-matrices.shape[-2] // ROWS), rows, matrices.size)
    return all(finite)
