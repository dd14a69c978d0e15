"""Linear algebra of the CPU backend: NumPy and SciPy, on the threads of md4."""

from functools import partial
from math import prod

import numpy as np

from md4.cpu.blas import add_matrix_vector, matrix_product, one_thread, solve_lower
from md4.cpu.threads import in_threads

# Rows of a table that a thread gathers at once.
ROWS = 16


class HostAlgebra:
    """`md4.backends.Algebra` on the host; arrays of the device are NumPy arrays.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
        Its memory counts what is allocated here.
    """

    xp, has_host_memory, has_groups, block_bytes, chunk_bytes = np, False, False, 64 << 20, 256 << 20

    def __init__(self, backend):
        self.backend = backend

    def working(self):
        """BLAS works in the thread that calls."""
        return one_thread()

    # arrays

    def memory_left(self):
        """Bytes that may be allocated."""
        return self.backend.memory_left()

    host_left = memory_left

    def check_fits(self, need, what, remedy="raise max_memory"):
        """As the backend."""
        self.backend.check_fits(need, what, remedy)

    def held_bytes(self, nbytes):
        """As many."""
        return self.backend.held_bytes(nbytes)

    def empty(self, shape):
        """An array that is counted."""
        if 8 * prod(shape) > self.backend.memory.left():
            self.backend.memory.kept.clear()  # workspaces, which `memory_left` calls free
        return self.backend.result(shape)

    host_table = empty

    def send(self, array):
        """The same array."""
        return array

    wrapped = send

    def fetch(self, array, out=None):
        """The same array, or its copy in `out`."""
        if out is None:
            return array
        out[...] = array
        return out

    def later(self, array, out=None):
        """The same array, or its copy in `out`."""
        return lambda: self.fetch(array, out)

    def taken(self, array):
        """The same array: engines on the CPU share their memory."""
        return array

    def put_columns(self, part, table, first):
        """Copies columns into a table."""
        table[:, first : first + part.shape[1]] = part

    def await_copies(self):
        """They are done."""

    def row_blocks(self, table, blocks):
        """Yields views of rows."""
        for first, last in blocks:
            yield first, table[first:last]

    def sorted_rows(self, array, places, out):
        """Rows in another order."""
        return np.take(array, places, axis=0, out=out, mode="clip")

    def gather(self, table, columns, out, rows=None):
        """Columns of each row, or of those that are chosen, by several threads."""
        count = len(table if rows is None else rows)
        flat, into = columns.reshape(-1), out.reshape(count, -1)

        def some(n):
            these = slice(n * ROWS, (n + 1) * ROWS)
            part = table[these] if rows is None else table[rows[these]]
            np.take(part, flat, axis=1, out=into[these], mode="clip")  # "raise" would make a copy first

        in_threads(-(-count // ROWS), some, into.size)
        return out

    unpack = gather_to_host = gather  # of `unpack`, the places above the diagonal are those below

    def pack(self, squares, columns, weights, out, scales=None, row=None, add=False):
        """By NumPy, a row a thread."""
        _, count, nao = squares.shape
        i, j = np.divmod(columns, nao)
        flat, places = squares.reshape(-1), np.maximum(i, j) * count * nao + np.minimum(i, j)

        def one(n):
            made = np.take(flat, places + n * nao, mode="clip")
            made *= weights
            if scales is not None:
                made += scales[n] * row
            if add:
                out[n] += made
            else:
                out[n] = made

        in_threads(count, one, out.size)
        return out

    def matrix_width(self, nao):
        """As many as there are columns."""
        return nao

    def unpack_and_sum(self, table, places, out, density):
        """As `unpack`, and a product of the matrices with the density."""
        self.gather(table, places, out)
        return out, self.add_times(out.reshape(len(table), -1), density.reshape(-1), np.zeros(len(table)))

    def takes_rows(self, nao, count):
        """Never."""
        return False

    def sums_bytes(self, nao):
        """None beside the sums."""
        return 0

    # products and factorisations

    def product(self, a, b, out, factor=1.0, add=False):
        """By NumPy's matmul."""
        return matrix_product(a, b, out, factor, add)

    def add_times(self, matrix, vector, out):
        """By NumPy's matmul."""
        return add_matrix_vector(matrix, vector, out)

    def cholesky(self, matrix):
        """L, or None."""
        from scipy import linalg

        lower = self.empty(matrix.shape)  # which is counted
        try:
            lower[...] = linalg.cholesky(matrix, lower=True, check_finite=False)
        except linalg.LinAlgError:
            return None
        return lower

    def eigh(self, matrix):
        """Eigenvalues and eigenvectors."""
        from scipy import linalg

        return linalg.eigh(matrix, check_finite=False)

    def svd(self, matrix):
        """Singular values and vectors."""
        from scipy import linalg

        return linalg.svd(matrix, full_matrices=False, check_finite=False)

    def lower_solver(self, lower):
        """Triangular equations by BLAS."""
        return partial(solve_lower, lower)
