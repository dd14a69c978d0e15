"""Products of matrices by the BLAS of NumPy, on the threads of md4.

OpenBLAS has threads of its own. After a product each of them holds a core for about 20 ms, in which it waits for the
next one, and PySCF's loops, which use other threads, then lack these cores. So md4 lets OpenBLAS work in the thread
that calls, and divides products among threads that sleep when they are done. Another BLAS is left as it is.
"""

import ctypes
import os
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from weakref import WeakSet

import numpy as np

from md4.cpu.threads import number_of_threads, run_all
from md4.support.locks import Lock, once

# Multiplications for which a further thread is worth waking: of a product of matrices, and of one with a vector, whose
# elements are read once.
PRODUCT_WORK, VECTOR_WORK = 1 << 21, 1 << 17
# Columns that a thread solves for at once, of which SciPy makes a copy.
COLUMNS = 256
# What the functions of an OpenBLAS may be called: as it is, and as it comes with NumPy and SciPy.
NAMES = [f"{prefix}openblas_{{}}{suffix}" for prefix, suffix in product(("scipy_", ""), ("64_", ""))]
# What openblas_get_parallel says of a library with threads of its own.
OWN_THREADS = 1

lock = Lock()


class Library:
    """An OpenBLAS of this process; `usual` is its number of threads outside of `one_thread`, None before."""

    def __init__(self, get, put):
        self.get, self.put, self.usual = get, put, None

    def limit(self):
        """From now on it works in the thread that calls."""
        if self.usual is None:
            self.usual = self.get()
            self.put(1)

    def release(self):
        """Undoes `limit`."""
        if self.usual is not None:
            self.put(self.usual)
            self.usual = None


class User:
    """A calculation within `one_thread`."""


users: WeakSet[User] = WeakSet()


@once
def libraries():
    """The `Library` of each OpenBLAS with threads of its own that NumPy and SciPy use."""
    from scipy import linalg  # noqa: F401 so that its BLAS is there

    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line.rpartition("/")[2]}
    return [found for path in sorted(paths) if (found := opened(path)) is not None]


def opened(path):
    """The `Library` of a file that is loaded; None if it has no threads of its own."""
    try:
        library = ctypes.CDLL(path)
    except OSError:  # it was replaced since
        return None
    for name in NAMES:
        found = [getattr(library, name.format(what), None) for what in ("get_num_threads", "set_num_threads")]
        kind = getattr(library, name.format("get_parallel"), None)
        if all(found) and kind is not None and kind() == OWN_THREADS:
            return Library(*found)
    return None


@contextmanager
def one_thread():
    """Within it OpenBLAS works in the thread that calls, for all threads of the process."""
    user, found = User(), libraries()
    try:
        with lock:
            users.add(user)
            for library in found:
                library.limit()
        yield
    finally:
        with lock:
            users.discard(user)
            if not users:
                release()


def release():
    """Gives OpenBLAS its threads back."""
    for library in libraries():
        library.release()


def forget_users():
    """Called in a child process after a fork, which has no other threads."""
    if users:
        users.clear()
        release()


os.register_at_fork(after_in_child=forget_users)


def threads_for(work, least):
    """Threads for so many multiplications, of which each should have `least`; one where BLAS has its own."""
    limited = any(library.usual is not None for library in libraries())
    return int(max(1, min(number_of_threads(), work // least))) if limited else 1


def in_tiles(rows, columns, threads, function):
    """Calls function(rows, columns) with slices that make up a matrix, one for each thread."""
    of_rows = min(threads, max(1, round((threads * rows / max(1, columns)) ** 0.5)))
    while threads % of_rows:
        of_rows -= 1
    tiles = list(product(cut(rows, of_rows), cut(columns, threads // of_rows)))
    run_all(len(tiles), lambda n: function(*tiles[n]))


def cut(count, parts):
    """`parts` slices of about the same length, those that are not empty."""
    ends = (count * n // parts for n in range(parts + 1))
    return [slice(a, b) for a, b in pairwise(ends) if a < b]


def matrix_product(a, b, out, factor=1.0, add=False):
    """out = factor a b, or out += factor a b; returns `out`."""

    def tile(rows, columns):
        into = out[rows, columns]
        made = np.matmul(a[rows], b[:, columns], out=None if add else into)
        if factor != 1.0:
            made *= factor
        if add:
            into += made

    in_tiles(*out.shape, threads_for(out.size * a.shape[1], PRODUCT_WORK), tile)
    return out


def add_matrix_vector(matrix, vector, out):
    """out += matrix vector; returns `out`."""

    def tile(rows, _):
        out[rows] += np.matmul(matrix[rows], vector)

    in_tiles(len(matrix), 1, threads_for(matrix.size, VECTOR_WORK), tile)
    return out


def solve_lower(lower, array, transposed=False):
    """L^-1 or L^-T times `array`, in place."""
    columns, threads = array.shape[1], threads_for(array.size * len(lower) // 2, PRODUCT_WORK)
    parts = cut(columns, threads * -(-columns // (threads * COLUMNS)) if threads > 1 else 1)
    run_all(len(parts), lambda n: solve_piece(lower, array[:, parts[n]], transposed), threads)
    return array


def solve_piece(lower, array, transposed):
    """`solve_lower` in one thread."""
    from scipy.linalg import blas

    # BLAS sees the transposed arrays: X^T L^T = A^T, or X^T L = A^T.
    solved = blas.dtrsm(1.0, lower.T, array.T, side=1, lower=0, trans_a=int(transposed), overwrite_b=1)
    if not np.may_share_memory(solved, array):
        array[...] = solved.T
