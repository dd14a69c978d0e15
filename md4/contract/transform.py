"""Integrals over molecular orbitals: sums over the rows of `md4.contract.pair_rows`, by matrix products.

One index of each side is transformed while the integrals are made. With M_P[nu, mu] = (mu nu|P), P = (lambda sigma):

    W[P, nu, i] = sum_mu M_P[nu, mu] C[mu, i]
    X[lambda, j, nu, i] += W[P, nu, i] C[sigma, j] ,  and with lambda and sigma exchanged if the shells differ
    (i nu|j lambda) = X[lambda, j, nu, i] + X[nu, i, lambda, j]

The last line completes integrals that were made once, for rows P and columns (mu nu) before them. Those of a piece with
itself are halved, since they are made in both orders. The other two indices follow for some pairs i, j at a time.
"""

from itertools import pairwise

import numpy as np

from md4.contract.fitting_stores import WORK_SHARE, table_width
from md4.contract.pair_rows import PairRows
from md4.contract.three_centre import HERMITE_SHARE
from md4.errors import MemoryLimitError
from md4.support.display import size_text
from md4.support.progress import Progress

# Matrices over AOs, and blocks over two virtual orbitals, that are needed at once for a pair i, j.
MATRICES, BLOCKS = 2, 4


class OneIndexOfEachSide:
    """(i nu|j lambda) of some orbitals i, j: what MP2 needs, from one pass through all integrals.

    Parameters
    ----------
    engine : md4.engine.Engine
        Its `bra_basis` is the basis. Threads may share it.
    orbitals : ndarray, shape (nao, n)
        Coefficients C of the orbitals i and j.
    virtual : int
        Largest number of orbitals of the other two indices.
    progress : bool, optional
        As in `md4.int2e`.

    Raises
    ------
    MemoryLimitError
        X and the least workspace do not fit; found before the first integral.
    UnsupportedError
        Shells with l > 8.
    """

    def __init__(self, engine, orbitals, virtual, progress=None):
        with engine.lock:
            self.engine, self.algebra = engine, engine.backend.algebra()
            with self.algebra.working():
                self.rows = PairRows(engine)
                self.nao, self.count, self.virtual = self.rows.nao, orbitals.shape[1], virtual
                self.orbitals = self.sorted(orbitals)
                most = self._most_rows()
                if self.count:
                    self._make(self.rows.pieces(most), progress)

    def sorted(self, coefficients):
        """Coefficients of orbitals, shape (nao, n), on the device, with AOs in the order of `rows`."""
        return self.algebra.send(np.ascontiguousarray(coefficients[self.rows.order], dtype=float))

    # memory

    @property
    def pair_bytes(self):
        """Bytes for one pair i, j in `blocks`."""
        return 8 * (MATRICES * self.nao * max(self.nao, self.virtual) + BLOCKS * self.virtual**2)

    def _row_bytes(self):
        """Bytes for a row of a piece, and for a row that is a matrix."""
        products = 3 * self.nao * self.count
        return 8 * (table_width(self.rows.nrow) + products), 8 * self.nao * self.algebra.matrix_width(self.nao)

    def _most_rows(self):
        """Rows of a piece; MemoryLimitError if there is no room for X and the longest piece that cannot be cut."""
        algebra, rows = self.algebra, self.rows
        kept, (row, matrix) = algebra.held_bytes(8 * (self.nao * self.count) ** 2), self._row_bytes()
        least = rows.workspace + max(rows.least_rows * row + matrix, self.pair_bytes)
        left = algebra.memory_left()
        if kept + least > left:
            raise MemoryLimitError(
                f"integrals over {self.count} orbitals of {self.nao} AOs take {size_text(kept)} and with the least "
                f"workspace {size_text(kept + least)}, but {size_text(left)} may be used; raise max_memory or freeze "
                "orbitals."
            )
        room = WORK_SHARE * (left - kept - rows.workspace)
        self.matrices_at_once = max(1, int(min(algebra.block_bytes, room / 2) // matrix))
        return max(rows.least_rows, int(min(algebra.chunk_bytes, room / 2) // row))

    # the pass

    def _make(self, pieces, progress):
        """X of all pieces."""
        algebra, rows = self.algebra, self.rows
        rows.compile_ahead(pieces, progress)
        self.x = algebra.empty((self.nao, self.count, self.nao * self.count))
        self.x[...] = 0.0
        places = algebra.send(rows.places())
        longest = max(last - first for first, last in pieces)
        widest = table_width(rows.nrow)
        table = algebra.empty((longest * widest,))
        dense = algebra.empty((min(longest, self.matrices_at_once) * self.nao * algebra.matrix_width(self.nao),))
        half, sorted_ = (algebra.empty((longest * self.nao * self.count,)) for _ in range(2))
        rows.store.fit(HERMITE_SHARE)
        with Progress(float(sum((last - first) * last for first, last in pieces)), progress, label="MO") as bar:
            for first, last in pieces:
                width = table_width(last)
                made = table[: (last - first) * width].reshape(last - first, width)
                rows.integrals(first, last, made)
                made[:, last:] = 0.0
                made[:, first:last] *= 0.5
                self._add(first, self._transformed(made, last, places, dense, half), sorted_)
                bar.update((last - first) * last)
        self.engine.backend.mark()()
        self.rows.store.clear()

    def _transformed(self, table, last, places, dense, half):
        """W of the rows of a piece, shape (rows, nu * count); nu are the AOs that occur so far."""
        algebra, reach = self.algebra, int(self.rows.reaches[last - 1])
        here = algebra.xp.minimum(places[:reach, :reach], last)  # where there is no integral yet, a column of zeros
        width, made = algebra.matrix_width(reach), half[: len(table) * reach * self.count].reshape(-1, self.count)
        for start in range(0, len(table), self.matrices_at_once):
            some = table[start : start + self.matrices_at_once]
            out = dense[: len(some) * reach * width].reshape(len(some), reach, width)
            matrices = algebra.unpack(some, here, out).reshape(len(some) * reach, reach)
            algebra.product(matrices, self.orbitals[:reach], made[start * reach : (start + len(some)) * reach])
        return made.reshape(len(table), reach * self.count)

    def _add(self, first, w, sorted_):
        """Adds to X what the rows of a piece are of it, whose first row is `first`."""
        rows, piece = self.rows, slice(first, first + len(w))
        one, other, twice = rows.first[piece], rows.second[piece], np.flatnonzero(rows.twice[piece])
        self._add_side(w, sorted_, one, other, np.argsort(one, kind="stable"))
        self._add_side(w, sorted_, other, one, twice[np.argsort(other[twice], kind="stable")])

    def _add_side(self, w, sorted_, target, source, chosen):
        """Adds W of the chosen rows, in ascending order of the AO `target`, times the orbitals at the AO `source`."""
        algebra = self.algebra
        into = sorted_[: len(chosen) * w.shape[1]].reshape(len(chosen), w.shape[1])
        algebra.sorted_rows(w, algebra.send(chosen), into)
        factors, aos = self.orbitals[algebra.send(source[chosen])], target[chosen]
        ends = np.flatnonzero(np.diff(aos, prepend=-1, append=-1))
        for start, stop in pairwise(ends.tolist()):
            out = self.x[int(aos[start])][:, : w.shape[1]]
            algebra.product(factors[start:stop].T, into[start:stop], out, add=True)

    # blocks over four orbitals

    def blocks(self, pairs, of_first, of_second):
        """Yields (some of the pairs, (i a|j b)), arrays of the device of shape (a, pair, b).

        The caller holds the engine's lock, and calls it within ``with algebra.working():``.

        Parameters
        ----------
        pairs : ndarray of int, shape (n, 2)
            The numbers i, j of orbitals.
        of_first, of_second : array, shapes (nao, a) and (nao, b)
            Coefficients that belong to i and to j, from `sorted`.
        """
        algebra, nao = self.algebra, self.nao
        a, b = of_first.shape[1], of_second.shape[1]
        room = min(algebra.chunk_bytes, WORK_SHARE * algebra.memory_left())
        most = max(1, min(len(pairs), int(room // self.pair_bytes)))
        for start in range(0, len(pairs) if a * b else 0, most):
            some = pairs[start : start + most]
            both = self._completed(some).reshape(len(some) * nao, nao)
            half = algebra.product(of_first.T, both.T, algebra.empty((a, len(both)))).reshape(-1, nao)
            del both
            made = algebra.product(half, of_second, algebra.empty((len(half), b)))
            del half
            yield some, made.reshape(a, len(some), b)

    def _completed(self, pairs):
        """(i nu|j lambda), shape (pair, lambda, nu)."""
        nao, count = self.nao, self.count
        x = self.x.reshape(nao, count, nao, count)
        out = self.algebra.empty((len(pairs), nao, nao))
        for n, (i, j) in enumerate(pairs.tolist()):
            out[n] = x[:, j, :, i]
            out[n] += x[:, i, :, j].T
        return out
