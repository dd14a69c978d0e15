"""Rows of the three-centre tensor B over pairs of orbitals, and integrals over four orbitals that are made of them.

    B[Q, ia] = sum_mn L[m, i] B[Q, mn] R[n, a] ,        (ia|jb) ~ sum_Q B[Q, ia] B[Q, jb]

Blocks of rows of a table of B become matrices on the device, unless the algebra makes products of the rows themselves,
and two products transform them, that with fewer orbitals first. Without a table the integrals (P|mn) are made once for
as many i as there is memory for, transformed as they come, and fitted at the end: W times (P|ia) is less work than W
times (P|mn).

What is made of pairs with pairs needs the array [ia, Q] on the device as a whole. Where it does not fit, `Pieces` has
it in ranges of i, of which two are there at a time.
"""

from operator import mul
from typing import Any, NamedTuple

import numpy as np

from md4.contract.direct_fitting import DirectBuild
from md4.contract.exchange_factors import half_of_rows, takes_rows
from md4.contract.fitting_stores import WORK_SHARE, block_rows, parts_within, zeros
from md4.support.memory import host_array

# For messages.
ROWS = "rows of fitted integrals over orbitals"
# Rows of a table for which a transformation has memory at least, beside what is kept of its results.
LEAST_ROWS = 16
# Share of the memory that is left which products of pieces may take.
PRODUCT_SHARE = 0.25


class Sides(NamedTuple):
    """A pair of sets of orbitals on the device; `first` has fewer orbitals, and is that of a if `turned`."""

    number: int
    first: Any
    second: Any
    turned: bool

    def give(self, take, rows, some, block):
        """Calls `take` with a block (n_first, rows, n_second) of some orbitals of the first set."""
        if self.turned:
            take(self.number, rows, slice(None), some, block.transpose(2, 1, 0))
        else:
            take(self.number, rows, some, slice(None), block)


def transform(fit, pairs, take, columns=None):
    """Makes B of pairs of orbitals.

    Parameters
    ----------
    fit : md4.contract.density_fitting.DensityFitting
        Its engine's lock is held, within `working` of its algebra.
    pairs : list of (ndarray, ndarray)
        L and R, shapes (nao, n_i) and (nao, n_a).
    take : callable
        Called with (number of the pair, slice of rows Q, slice of i, slice of a, block); the block, on the device, has
        the shape (n_i, rows, n_a) and is valid until the next call.
    columns : md4.contract.fitting_stores.Columns, optional
        With the rows that are made from integrals, whether there is a table or not.
    """
    sides = []
    for number, pair in enumerate(pairs):
        turned = pair[1].shape[1] < pair[0].shape[1]
        sent = [fit.algebra.send(np.ascontiguousarray(side.T)).T for side in (pair[::-1] if turned else pair)]
        if sent[0].shape[1]:
            sides.append(Sides(number, *sent, turned))
    if not sides:
        return
    if fit.table is None or columns is not None:
        from_integrals(columns or fit.columns, sides, take)
    else:
        from_table(fit.table, fit.places, sides, take)


def row_bytes(algebra, nao, copies, shapes):
    """Bytes for a row of a table in `from_table`: its copies, the matrix, and results of both products.

    `shapes` are the numbers of orbitals of both sets of each pair. Results may be copied once more by who takes them.
    """
    first, made = max(map(min, shapes)), max(n * m for n, m in shapes)
    return 8 * (copies + nao * (algebra.matrix_width(nao) + first) + 2 * made)


def column_bytes(columns, n_second):
    """Bytes for an orbital of the first set in `from_integrals`."""
    return 8 * columns.three.naux * (columns.three.nao + 2 * n_second)


def least_bytes(fit, pairs):
    """Bytes that `transform` needs beside its results, for `LEAST_ROWS` of a table or one orbital."""
    shapes = [tuple(side.shape[1] for side in pair) for pair in pairs]
    if fit.table is not None:
        return LEAST_ROWS * row_bytes(fit.algebra, fit.nao, fit.table.copies, shapes)
    return fit.columns.least_bytes + int(column_bytes(fit.columns, max(map(max, shapes))) / WORK_SHARE)


def from_table(table, places, sides, take):
    """`transform` of the rows of a table."""
    algebra, size, nao = table.algebra, len(table.table), len(places)
    first, second = ([side[n].shape[1] for side in sides] for n in (1, 2))
    most = min(size, block_rows(algebra, row_bytes(algebra, nao, table.copies, [*zip(first, second)])))
    left = [side.first for side in sides]
    dense = None if takes_rows(algebra, nao, left) else algebra.empty((most, nao, algebra.matrix_width(nao)))
    half, out = algebra.empty((most * nao * max(first),)), algebra.empty((most * max(map(mul, first, second)),))
    for start, rows in table.blocks(0, size, max(1, most)):
        block = None if dense is None else algebra.unpack(rows, places, dense[: len(rows)])
        for side, n, m in zip(sides, first, second):
            once = half_of_rows(algebra, rows, places, block, side.first, half)
            both = algebra.product(once, side.second, out[: len(once) * m].reshape(len(once), m))
            side.give(take, slice(start, start + len(rows)), slice(None), both.reshape(n, len(rows), m))


def from_integrals(columns, sides, take):
    """`transform` from integrals, which are made once for each of the `groups`."""
    algebra, three, metric = columns.algebra, columns.three, columns.metric
    build = DirectBuild(columns, None)
    for group in groups(columns, sides):
        chosen = [side.first[:, some] for side, some in group]
        halves = [zeros(algebra, (three.naux, vectors.shape[1], three.nao)) for vectors in chosen]
        for start, stop, chunk in columns.chunks():
            build.add_half_transformed(chunk, start, stop, chosen, halves)
        for side, some in group:
            half, m = halves.pop(0), side.second.shape[1]
            n = half.shape[1]
            both = algebra.empty((three.naux * n, m))
            algebra.product(half.reshape(-1, three.nao), side.second, both)
            fitted = metric.apply(both.reshape(three.naux, n * m)).reshape(metric.size, n, m)
            side.give(take, slice(0, metric.size), some, fitted.transpose(1, 0, 2))


def groups(columns, sides):
    """Lists of (Sides, slice of the orbitals of the first set) whose half-transformed integrals fit into memory."""
    left = columns.algebra.memory_left() - columns.least_bytes
    ranges = [(n, 0, side.first.shape[1], column_bytes(columns, side.second.shape[1])) for n, side in enumerate(sides)]
    largest = max((size for *_, size in ranges), default=0)
    need = columns.least_bytes + largest / WORK_SHARE
    columns.algebra.check_fits(need, "with store='direct', integrals over one orbital need at least")
    found = parts_within(ranges, int(WORK_SHARE * left))
    return [[(sides[n], slice(first, last)) for n, first, last in group] for group in found]


def rows_into(algebra, out):
    """A `take` for `transform` of one pair that writes to a NumPy array (rows, n_i, n_a)."""

    def take(_, rows, i, a, block):
        out[rows, i, a] = algebra.fetch(algebra.xp.ascontiguousarray(block.transpose(1, 0, 2)))

    return take


class Piece(NamedTuple):
    """Orbitals i from first to last - 1 of a pair of sets; `start` is the place of its first row ia among all."""

    number: int
    first: int
    last: int
    start: int
    rows: int


class Pieces:
    """Arrays [ia, Q] of pairs of orbitals on the device, whole or in ranges of i.

    Parameters
    ----------
    fit : md4.contract.density_fitting.DensityFitting or md4.contract.fitting_team.FittingTeam
    pairs : list of (ndarray, ndarray)
        As for `transform`.
    triangles : list of bool, optional
        Of which pairs only a <= i is wanted.
    beside : int
        Bytes that are needed beside the arrays.

    Raises
    ------
    MemoryLimitError
        There is no memory for two orbitals i at once.
    """

    def __init__(self, fit, pairs, triangles=None, beside=0):
        self.fit, self.pairs, self.triangles = fit, pairs, triangles or [False] * len(pairs)
        with fit.working():
            left, other = fit.algebra.memory_left(), beside + fit.transform_bytes(pairs)
        self.pieces = [self.piece(n, 0, left.shape[1]) for n, (left, _) in enumerate(pairs)]
        self.pieces = [piece for piece in self.pieces if piece.rows]
        self.whole = sum(map(self.bytes_of, self.pieces)) <= left - other
        if not self.whole:
            self.pieces = [part for piece in self.pieces for part in self.cut(piece, left, other)]

    def cut(self, piece, left, other):
        """Parts of a piece, of which two fit into the memory that is left beside other bytes."""
        first, parts = 0, []
        while first < piece.last:
            last = piece.last
            while (need := 2 * self.bytes_of(self.piece(piece.number, first, last)) + other) > left:
                if last == first + 1:
                    others = self.pairs[piece.number][1].shape[1]
                    what = f"fitted integrals of two orbitals with {others} others and {self.fit.size} auxiliary "
                    with self.fit.working():
                        self.fit.algebra.check_fits(need, f"{what}functions and the least workspace take")
                    break  # they fit by now
                last = first + (last - first + 1) // 2
            parts.append(self.piece(piece.number, first, last))
            first = last
        return parts

    def piece(self, number, first, last):
        """The `Piece` of a range of i."""
        m = self.pairs[number][1].shape[1]
        start, stop = (i * (i + 1) // 2 if self.triangles[number] else i * m for i in (first, last))
        return Piece(number, first, last, start, stop - start)

    def bytes_of(self, piece):
        """Bytes on the device."""
        return self.fit.algebra.held_bytes(8 * piece.rows * self.fit.size)

    def made(self, pieces):
        """The arrays of pieces, shapes (rows, size)."""
        fit, size = self.fit, self.fit.size
        pairs = [(self.pairs[n][0][:, first:last], self.pairs[n][1]) for n, first, last, *_ in pieces]
        with fit.working():
            arrays = [fit.algebra.empty((piece.rows, size)) for piece in pieces]

        def take(number, rows, some, a, block):
            piece, array = pieces[number], arrays[number]
            if self.triangles[piece.number]:  # whose sides are never turned
                for i, of_i in zip(range(piece.first, piece.last)[some], block):
                    start = i * (i + 1) // 2 - piece.start
                    array[start : start + i + 1, rows] = of_i[:, : i + 1].T
            else:
                array.reshape(piece.last - piece.first, -1, size)[some, a, rows] = block.transpose(0, 2, 1)

        fit.transformed(pairs, take)
        return arrays

    def each(self, use):
        """Calls use(piece, array) for all."""
        kept = self.made(self.pieces) if self.whole else None
        for n, piece in enumerate(self.pieces):
            use(piece, kept[n] if self.whole else self.made([piece])[0])

    def products(self, wanted, use):
        """Calls use(piece, array, piece, array) for pairs of sets (number, number) that are wanted.

        Of the pieces of one set with each other, the second one is not behind the first.
        """
        kept = dict(zip(self.pieces, self.made(self.pieces))) if self.whole else {}
        for one in self.pieces:
            others = [
                other
                for other in self.pieces
                if (one.number, other.number) in wanted and (one.number != other.number or other.first <= one.first)
            ]
            mine = None  # frees memory first
            if others:
                mine = kept[one] if self.whole else self.made([one])[0]
            for other in others:
                if self.whole or other == one:
                    use(one, mine, other, kept.get(other, mine))
                else:
                    use(one, mine, other, self.made([other])[0])


def share_of(fit, nbytes):
    """Bytes for products of pieces: as many as asked for, less if these are more than is worth while or too many."""
    with fit.working():
        return int(min(nbytes, fit.algebra.block_bytes, PRODUCT_SHARE * fit.algebra.memory_left()))


def integrals(fit, bra, ket=None, compact=(False, False)):
    """(ij|kl) from fitted integrals, a NumPy array of shape (pairs ij, pairs kl).

    Parameters
    ----------
    fit : DensityFitting or FittingTeam
    bra, ket : (ndarray, ndarray)
        Orbitals i and j, and k and l, with contiguous or other arrays (nao, n); the ket is the bra if it is left out.
    compact : (bool, bool)
        Whether bra and ket have pairs with j <= i only; then i and j are the same orbitals.

    Raises
    ------
    MemoryLimitError
        The host has no memory for the result, or the device not for the least part of the work.
    """
    pairs, last = [bra] if ket is None else [bra, ket], int(ket is not None)
    counts = [[side.shape[1] for side in pair] for pair in pairs]
    shape = [n * (n + 1) // 2 if triangle else n * m for (n, m), triangle in zip(counts, compact)]
    shape = shape[0], shape[last]
    out = host_array(shape, f"{shape[0]} x {shape[1]} integrals over orbitals")
    pieces = Pieces(fit, pairs, compact, share_of(fit, 8 * shape[0] * shape[1]))

    def use(one, mine, other, theirs):
        algebra = fit.algebra
        with fit.working():
            most = min(one.rows, block_rows(algebra, 8 * other.rows))
            made = algebra.empty((most, other.rows))
            for first in range(0, one.rows, most):
                part = mine[first : first + most]
                found = algebra.fetch(algebra.product(part, theirs.T, made[: len(part)]))
                here = slice(one.start + first, one.start + first + len(part))
                there = slice(other.start, other.start + other.rows)
                out[here, there] = found
                if one.number == other.number and one != other:
                    out[there, here] = found.T

    pieces.products({(0, last)}, use)
    return out
