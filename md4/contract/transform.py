"""Integrals over molecular orbitals: sums over the rows of `md4.contract.pair_rows`, by matrix products.

One index of each side is transformed while the integrals are made. With M_P[nu, mu] = (mu nu|P), P = (lambda sigma):

    W[P, nu, i] = sum_mu M_P[nu, mu] C[mu, i]
    X[lambda, j, nu, i] += W[P, nu, i] C[sigma, j] ,  and with lambda and sigma exchanged if the shells differ
    (i nu|j lambda) = X[lambda, j, nu, i] + X[nu, i, lambda, j]

The last line completes integrals that were made once, for rows P and columns (mu nu) before them. Those of a piece with
itself are halved, since they are made in both orders. The other two indices follow for some pairs i, j at a time.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from md4.contract.fitting_stores import WORK_SHARE, table_width, zeros
from md4.support.display import size_text
from md4.support.progress import Progress

# Matrices over AOs, and blocks over two virtual orbitals, that are needed at once for a pair i, j.
MATRICES, BLOCKS = 2, 3
# As many times as long as others are pieces of which no matrices are made: X is read and written once a piece.
LONG_PIECES = 3
# Bytes of X that go from one device to another at a time.
SUM_BYTES = 128 << 20


class Sizes(NamedTuple):
    """Bytes of a pass.

    Attributes
    ----------
    kept : int
        X, and (ij|P) of the same side.
    row, matrix : int
        A row of a piece with its products, and a row as a matrix.
    pair : int
        A pair i, j in `blocks`.
    least : int
        The least workspace beside what is kept.
    """

    kept: int
    row: int
    matrix: int
    pair: int
    least: int

    @classmethod
    def of(cls, team, count, virtual, few=0):
        """Of so many orbitals i and j, at most `virtual` others, and `few` pairs of the same side."""
        rows, algebra = team.rows[0], team.algebra
        nao, width = rows.nao, table_width(rows.nrow)
        kept = algebra.held_bytes(8 * (nao * count) ** 2) + 8 * few * width
        row = 8 * (width + 3 * nao * count + (few and 2 * few + count**2))
        matrix = 8 * nao * algebra.matrix_width(nao)
        pair = 8 * (MATRICES * nao * max(nao, virtual) + BLOCKS * virtual**2)
        places = (32 if algebra.takes_rows(nao, count) else 16) * nao**2  # those of tiles as well
        least = rows.workspace + places + max(rows.least_rows * row + matrix, pair)
        return cls(kept, row, matrix, pair, least)


def most_orbitals(team, count, virtual):
    """The number of orbitals i, j, up to `count`, for which `OneIndexOfEachSide` has memory."""
    sizes = [Sizes.of(team, n, virtual) for n in range(count + 1)]
    left = team.memory_left()  # now that there are the lists of pairs
    return max((n for n, size in enumerate(sizes) if size.kept + size.least <= left), default=0)


class OneIndexOfEachSide:
    """(i nu|j lambda) of some orbitals i, j: what MP2 needs, from one pass through all integrals.

    Parameters
    ----------
    team : md4.contract.row_team.RowTeam
        Its devices share the pass; X is added up on the first one, which makes all that follows.
    orbitals : ndarray, shape (nao, n)
        Coefficients C of the orbitals i and j.
    virtual : int
        Largest number of orbitals of the other two indices.
    same_side : ndarray of int, shape (n, 2), optional
        A few pairs i, j, of which (ij|P) of all rows P are made in the same pass.

    Attributes
    ----------
    of_pairs : array, shape (n, table_width(rows.nrow))
        (ij|P), and zeros behind them; None without `same_side`.

    Raises
    ------
    MemoryLimitError
        X and the least workspace do not fit; found before the first integral.
    UnsupportedError
        Shells with l > 8.
    """

    def __init__(self, team, orbitals, virtual, same_side=None):
        self.team, self.algebra, self.count, self.virtual = team, team.algebra, orbitals.shape[1], virtual
        self.same_side, self.of_pairs = same_side, None
        with team.engine.lock, self.algebra.working():
            self.rows = team.rows[0]
            self.nao = self.rows.nao
            most = self._most_rows()
            if self.count:
                self._make_all(self.rows.pieces(most), orbitals)

    def sorted(self, coefficients):
        """Coefficients of orbitals, shape (nao, n), on the device, with AOs in the order of `rows`."""
        return self.algebra.send(np.ascontiguousarray(coefficients[self.rows.order], dtype=float))

    # memory

    def _most_rows(self):
        """Rows of a piece; MemoryLimitError if there is no room for X and the longest piece that cannot be cut."""
        algebra, rows, few = self.algebra, self.rows, 0 if self.same_side is None else len(self.same_side)
        size, left = Sizes.of(self.team, self.count, self.virtual, few), self.team.memory_left()
        what = f"integrals over {self.count} orbitals of {self.nao} AOs take {size_text(size.kept)} and with the least"
        self.team.check_fits(size.kept + size.least, f"{what} workspace", "raise max_memory or freeze orbitals")
        room = WORK_SHARE * (left - size.kept - rows.workspace - 16 * self.nao**2)
        most, self.matrices_at_once = rows.at_once(algebra, room, size.row, size.matrix)
        if algebra.takes_rows(self.nao, self.count):  # and needs no matrices
            return max(rows.least_rows, int(min(LONG_PIECES * algebra.block_bytes, room) // size.row))
        return most

    # the pass

    def _make_all(self, pieces, orbitals):
        """X of all pieces."""
        self.team.compile_ahead(False, orbitals=self.count)
        costs = [(last - first) * last for first, last in pieces]
        with Progress(float(sum(costs)), label="MO") as bar:
            shares = self.team.deal(self, pieces, costs, lambda share, own: share._make(own, orbitals, bar))
        for other in shares[1:]:
            self._take(other)

    def _take(self, other):
        """Adds what another device has made, and waits until its memory is free again."""
        most = max(1, int(min(SUM_BYTES, WORK_SHARE * self.algebra.memory_left()) // self.x[0].nbytes))
        try:
            for first in range(0, self.nao, most):
                self.x[first : first + most] += self.algebra.taken(other.x[first : first + most])
            if self.of_pairs is not None:
                self.of_pairs += self.algebra.taken(other.of_pairs)
        finally:
            self.rows.engine.backend.mark()()

    def _make(self, pieces, orbitals, bar):
        """X of the pieces of a device; returns its share."""
        algebra, rows, self.orbitals = self.algebra, self.rows, self.sorted(orbitals)
        self.x = zeros(algebra, (self.nao, self.count, self.nao * self.count))
        if self.same_side is not None:
            self.of_pairs = zeros(algebra, (len(self.same_side), table_width(rows.nrow)))
        places = self.places = algebra.send(rows.places())
        longest = max((last - first for first, last in pieces), default=0)
        widest = table_width(rows.nrow)
        table = algebra.empty((longest * widest,))
        half, dense = algebra.empty((longest * self.nao * self.count,)), None
        sorted_ = None if algebra.has_groups else algebra.empty(half.shape)
        if not algebra.takes_rows(self.nao, self.count):
            dense = algebra.empty((min(longest, self.matrices_at_once) * self.nao * algebra.matrix_width(self.nao),))
        for first, last, made in rows.once(pieces, table, bar):
            w = self._transformed(made, last, places, dense, half)
            for aos, others, chosen in rows.both_orders(first, last):
                self._add(w, sorted_, aos, others, chosen)
            if self.same_side is not None:
                self._add_pairs(slice(first, last), w, made)
        rows.engine.backend.mark()()
        rows.store.clear()
        return self

    def _transformed(self, table, last, places, dense, half):
        """W of the rows of a piece, shape (rows, nu * count); nu are the AOs that occur so far."""
        algebra, reach = self.algebra, int(self.rows.reaches[last - 1])
        here = algebra.xp.minimum(places[:reach, :reach], last)  # where there is no integral yet, a column of zeros
        width, made = algebra.matrix_width(reach), half[: len(table) * reach * self.count].reshape(-1, self.count)
        if dense is None:
            algebra.half_transform(table, here, self.orbitals[:reach], made.reshape(len(table), reach, self.count))
            return made.reshape(len(table), -1)
        for start in range(0, len(table), self.matrices_at_once):
            some = table[start : start + self.matrices_at_once]
            out = dense[: len(some) * reach * width].reshape(len(some), reach, width)
            matrices = algebra.unpack(some, here, out).reshape(len(some) * reach, reach)
            algebra.product(matrices, self.orbitals[:reach], made[start * reach : (start + len(some)) * reach])
        return made.reshape(len(table), reach * self.count)

    def _add(self, w, sorted_, aos, others, chosen):
        """Adds W of the chosen rows to X of the AOs lambda, which ascend, times the orbitals at the AOs sigma."""
        algebra = self.algebra
        if sorted_ is None:
            algebra.add_groups(w, chosen, self.orbitals, others, aos, self.x)
            return
        into = sorted_[: len(chosen) * w.shape[1]].reshape(len(chosen), w.shape[1])
        algebra.sorted_rows(w, algebra.send(chosen), into)
        factors = self.orbitals[algebra.send(others)]
        for start, stop in pairwise(np.flatnonzero(np.diff(aos, prepend=-1, append=-1)).tolist()):
            out = self.x[int(aos[start])][:, : w.shape[1]]
            algebra.product(factors[start:stop].T, into[start:stop], out, add=True)

    def _add_pairs(self, piece, w, table):
        """Adds to `of_pairs` what a piece has of them: of its rows, and by its rows of all columns."""
        algebra, rows, (i, j) = self.algebra, self.rows, self.same_side.T
        i, j = algebra.send(np.ascontiguousarray(i)), algebra.send(np.ascontiguousarray(j))
        reach = w.shape[1] // self.count
        both = algebra.xp.matmul(self.orbitals[:reach].T, w.reshape(-1, reach, self.count))
        self.of_pairs[:, piece] += both[:, j, i].T
        one, other = (self.orbitals[algebra.send(aos[piece])] for aos in (rows.first, rows.second))
        twice = algebra.send(rows.twice[piece].astype(float))
        densities = one[:, i] * other[:, j] + twice[:, None] * (other[:, i] * one[:, j])
        algebra.product(densities.T, table[:, : piece.stop], self.of_pairs[:, : piece.stop], add=True)

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
        algebra = self.algebra
        a, b = of_first.shape[1], of_second.shape[1]
        room = min(algebra.chunk_bytes, WORK_SHARE * algebra.memory_left())
        most = max(1, min(len(pairs), int(room // Sizes.of(self.team, self.count, self.virtual).pair)))
        for start in range(0, len(pairs) if a * b else 0, most):
            some = pairs[start : start + most]
            yield some, both_indices(algebra, self._completed(some), of_first, of_second)

    def over_same_side(self, one, other):
        """Yields (number of the first pair, (pq|ij)) of `same_side`, shapes (p, pair, q); arguments as of `blocks`."""
        algebra, nao = self.algebra, self.nao
        bytes_of_one = 8 * (nao * (algebra.matrix_width(nao) + one.shape[1]) + 2 * one.shape[1] * other.shape[1])
        most = max(1, int(min(algebra.block_bytes, WORK_SHARE * algebra.memory_left()) // bytes_of_one))
        return transformed_rows(algebra, self.of_pairs, self.places, (one, other), most)

    def _completed(self, pairs):
        """(i nu|j lambda), shape (pair, lambda, nu)."""
        nao, count = self.nao, self.count
        x = self.x.reshape(nao, count, nao, count)
        out = self.algebra.empty((len(pairs), nao, nao))
        for n, (i, j) in enumerate(pairs.tolist()):
            out[n] = x[:, j, :, i]
            out[n] += x[:, i, :, j].T
        return out


def both_indices(algebra, matrices, one, other):
    """sum_kl one[l, a] M_n[k, l] other[k, b] of matrices, shape (n, nao, nao), as an array of the shape (a, n, b)."""
    count, nao = matrices.shape[:2]
    rows = matrices.reshape(count * nao, nao)
    half = algebra.product(one.T, rows.T, algebra.empty((one.shape[1], count * nao))).reshape(-1, nao)
    return algebra.product(half, other, algebra.empty((len(half), other.shape[1]))).reshape(one.shape[1], count, -1)


def transformed_rows(algebra, table, places, sets, most):
    """Yields (number of the first row, (a, row, b)) of rows of a table, both of whose indices are transformed.

    Parameters
    ----------
    table : array, shape (rows, width)
    places : array of int64, shape (nao, nao)
        The column of each pair of AOs, as for `Algebra.unpack`.
    sets : (array, array)
        Coefficients, shapes (nao, a) and (nao, b).
    most : int
        Rows that are matrices at a time.
    """
    nao, (one, other) = len(places), sets
    dense = algebra.empty((min(most, len(table)), nao, algebra.matrix_width(nao)))
    for at in range(0, len(table), most):
        matrices = algebra.unpack(table[at : at + most], places, dense[: len(table) - at])
        if one.shape[1] <= other.shape[1]:
            yield at, both_indices(algebra, matrices, one, other)
        else:
            yield at, both_indices(algebra, matrices, other, one).transpose(2, 1, 0)
