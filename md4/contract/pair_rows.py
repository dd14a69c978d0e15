"""Integrals (Q|P) over four centres as a matrix that is made in pieces: rows P and columns Q are pairs of AOs.

Rows first to last - 1 with the columns 0 to last - 1, one piece after the other, hold each unordered pair of shell
pairs once, but for those of a piece with itself, which are there in both orders.
"""

from copy import copy
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from md4.contract.fitting_stores import table_width
from md4.contract.three_centre import (
    BELOW_COULOMB,
    HERMITE_SHARE,
    aos_of,
    columns_of,
    ranges_between,
    screened,
    slices_of,
)
from md4.contract.workspace import HermiteStore, least_block
from md4.method.operators import check_order
from md4.plan import ListPair
from md4.shells.shell_pairs import pairs_by_kind

# Hartree. Shell pairs are left out whose Schwarz bound with every other one is below this.
CUTOFF = 1e-14
# A piece has at most this share of the rows: what it has with itself is made in both orders.
SHARE_OF_ROWS = 16


class Runs(NamedTuple):
    """Rows in an order in which many of them share one AO, while the other one is the next one each time.

    Attributes
    ----------
    one, other : ndarray of int64, shape (n,)
        Places of the two AOs of each row.
    twice : ndarray of bool, shape (n,)
        As in `PairRows`; the same for all rows of a run.
    rows : ndarray of int64, shape (n,)
        Numbers of the rows.
    edges : ndarray of int64
        Where runs begin, and n.
    """

    one: np.ndarray
    other: np.ndarray
    twice: np.ndarray
    rows: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, one, other, twice):
        """Rows with these AOs."""
        rows = np.lexsort((other, one))
        one, other, twice = one[rows], other[rows], twice[rows]
        within = (np.diff(one) == 0) & (np.diff(other) == 1) & (twice[1:] == twice[:-1])
        return cls(one, other, twice, rows, np.flatnonzero(~np.concatenate(([False], within, [False]))))

    def between(self, start, stop):
        """(begin, end) of the runs, or of parts of them, from row `start` to row `stop` - 1."""
        inside = self.edges[(self.edges > start) & (self.edges < stop)]
        return pairwise([start, *inside.tolist(), stop])


class PairRows:
    """The rows of all pairs of AOs of a basis.

    Matrices over AOs have these in ascending order of the classes of their shells. So the AOs that occur in a piece and
    in those before it are the first ones.

    Parameters
    ----------
    engine : md4.engine.Engine
        Its `bra_basis` is the basis. The caller holds its lock, here and for all methods.

    Attributes
    ----------
    nao, nrow : int
    order : ndarray of int64, shape (nao,)
        The AO of the basis that is at each place of the matrices.
    first, second : ndarray of int64, shape (nrow,)
        Places of the two AOs of each row. Rows run shell pair by shell pair, in a pair as [a][b]. A pair of two shells
        is there once, all products of a shell with itself are.
    twice : ndarray of bool, shape (nrow,)
        Whether a row stands for (first, second) and (second, first), as those of two shells do.
    edges : ndarray of int64, shape (npair + 1,)
        First row of each shell pair, and the number of rows.

    Raises
    ------
    UnsupportedError
        Shells with l > 8.
    MemoryLimitError
        Not even one block of integrals fits.
    """

    def __init__(self, engine):
        basis = engine.bra_basis.segmented()
        check_order(4 * basis.lmax)
        self.engine, self.basis, self.nao = engine.with_basis(basis), basis, basis.nao
        self.workspace = least_block(self.engine, (0, basis.nshell))
        engine.backend.check_fits(self.workspace, "one block of integrals with its workspace takes")
        self.lists = pairs_by_kind(basis, engine.backend.sums.mixed_shells)
        if engine.operator.kind in BELOW_COULOMB:
            self.lists = screened(self.engine, self.lists, CUTOFF, "bounds of rows")
        self.edges, self.twice = columns_of(basis, self.lists)
        self.nrow = int(self.edges[-1])
        self.order = np.argsort(np.repeat(basis.class_keys, np.diff(basis.ao_loc)), kind="stable")
        self.first, self.second = np.argsort(self.order)[aos_of(basis, self.lists)]
        # H matrices of a bra and a ket list, and of slices of them.
        self.workspace += 3 * max((self.store.size(this) for this in self.prepared), default=0)

    def on(self, engine):
        """The same rows for another engine."""
        other = copy(self)
        other.engine = engine.with_basis(self.basis)
        for made in ("prepared", "store"):
            other.__dict__.pop(made, None)
        return other

    @cached_property
    def prepared(self):
        """`PreparedPairs` of all lists."""
        return list(self.engine.prepare_lists(self.lists, self.basis))

    @cached_property
    def store(self):
        """Keeps H matrices between pieces."""
        return HermiteStore(int(HERMITE_SHARE * self.engine.backend.memory_left()), self.engine.backend)

    @cached_property
    def reaches(self):
        """Number of the AOs, the first ones, that occur in the rows up to each one; shape (nrow,)."""
        return np.maximum.accumulate(np.maximum(self.first, self.second)) + 1

    @property
    def least_rows(self):
        """Rows of the largest shell pair, which no piece divides."""
        return int(np.diff(self.edges).max(initial=0))

    def at_once(self, algebra, room, row, matrix):
        """(rows of a piece, matrices) to work on at once, of so many bytes each, where there are `room` bytes."""
        rows = min(max(algebra.chunk_bytes, algebra.block_bytes), room / 2) // row
        return max(self.least_rows, int(rows)), max(1, int(min(algebra.block_bytes, room / 2) // matrix))

    def places(self):
        """The column of each pair of AOs, shape (nao, nao); those that are left out have `nrow`."""
        found = np.full((self.nao, self.nao), self.nrow)
        found[self.second[self.twice], self.first[self.twice]] = np.flatnonzero(self.twice)
        found[self.first, self.second] = np.arange(self.nrow)
        return found

    def pieces(self, most):
        """(first, last) of pieces of at most so many rows, if shell pairs have no more."""
        return ranges_between(self.edges, 0, self.nrow, min(most, -(-self.nrow // SHARE_OF_ROWS)))

    def compile_ahead(self, complete, progress=None, orbitals=0):
        """Compiles what is missing for rows with all columns, or for pieces of them with those up to the piece.

        `orbitals`: how many these rows are multiplied by.
        """

        def work(backend):
            self.on(self.engine.with_backend(backend)).rehearse(complete)
            backend.rehearse_rows(self.nao, orbitals)

        self.engine.backend.compile_ahead("tensor", self.basis, work, progress, ("rows", complete, self.nrow, orbitals))

    def rehearse(self, complete):
        """What a dry run of `compile_ahead` does on its backend."""
        for first, last in self.pieces(self.nrow):
            columns = self.nrow if complete else last
            self.integrals(first, last, self.engine.backend.result((last - first, columns)), columns)

    def once(self, pieces, numbers, bar):
        """Yields (first, last, table) of pieces, which together hold each integral once, if both orders are added up.

        The columns are those up to `last`; integrals of a piece with itself are halved, and there are zeros behind.
        The caller is done with a table when it asks for the next one.

        Parameters
        ----------
        pieces : list of (int, int)
        numbers : array
            Memory for a table of the longest piece and `table_width(nrow)`.
        bar : md4.support.progress.Progress
            Is told the number of integrals.
        """
        self.store.fit(HERMITE_SHARE)
        for first, last in pieces:
            width = table_width(last)
            table = numbers[: (last - first) * width].reshape(last - first, width)
            self.integrals(first, last, table, last)
            table[:, last:] = 0.0
            table[:, first:last] *= 0.5
            yield first, last, table
            bar.update((last - first) * last)

    def both_orders(self, first, last):
        """Yields (lambda, sigma, rows) of some rows and of those that also stand for (sigma, lambda), by lambda."""
        one, other, twice = (each[first:last] for each in (self.first, self.second, self.twice))
        again = np.flatnonzero(twice)
        for target, source, chosen in ((one, other, np.arange(last - first)), (other, one, again)):
            rows = chosen[np.argsort(target[chosen], kind="stable")]
            yield target[rows], source[rows], rows

    def in_runs(self, first, last):
        """`Runs` of some rows, by that one of their AOs for which there are fewer."""
        one, other, twice = (each[first:last] for each in (self.first, self.second, self.twice))
        return min((Runs.of(*aos, twice) for aos in ((one, other), (other, one))), key=lambda runs: len(runs.edges))

    def integrals(self, first, last, out, columns):
        """The integrals of the rows first to last - 1 with the columns 0 to `columns` - 1.

        Parameters
        ----------
        first, last, columns : int
            All among `edges`.
        out : array, shape (last - first, width)
            An array of the backend, C-contiguous; what is behind the columns is not written.
        """
        start, stop, end = np.searchsorted(self.edges, (first, last, columns)).tolist()
        kets = {part.whole: (part, row) for part, row in slices_of(self.prepared, start, stop)}
        bras = {part.whole: (part, column) for part, column in slices_of(self.prepared, 0, end)}
        pairs = [ListPair(bra, ket, same=False) for bra, ket in product(bras, kets)]
        for batch in self.store.batches(pairs):
            some = [pair._replace(bra=bras[pair.bra][0], ket=kets[pair.ket][0]) for pair in batch]
            self.engine.backend.fill_matrix(self.engine, out, some, dict(bras.values()), dict(kets.values()))
