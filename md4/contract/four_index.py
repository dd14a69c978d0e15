"""(pq|rs) over four sets of orbitals, one side after the other.

    (pq|P) = sum_mu,nu C[mu, p] C[nu, q] (mu nu|P)          for all rows P of `md4.contract.pair_rows`
    (pq|rs) = sum_lambda,sigma C[lambda, r] C[sigma, s] (pq|lambda sigma)

Rows P are complete, so each integral is made twice. (pq|P) of all P are kept in between, on the device or on the host;
where there is no memory for all p, ranges of p follow one another, each of which makes all integrals.
"""

from itertools import pairwise

import numpy as np

from md4.contract.fitting_stores import WORK_SHARE, table_width
from md4.contract.pair_rows import PairRows
from md4.contract.three_centre import HERMITE_SHARE
from md4.contract.transform import transformed_rows
from md4.errors import MemoryLimitError
from md4.support.display import size_text
from md4.support.progress import Progress

# Shares of the memory that is left: of (pq|P) where they are kept on the device, and where on the host.
DEVICE_SHARE, HOST_SHARE = 0.4, 0.5
# Arrays of the size of both products of a matrix that are needed at once.
PRODUCTS = 3


class Side:
    """Two sets of orbitals p, q; with `compact` they are the same, and only pairs q <= p count.

    Attributes
    ----------
    one, other : ndarray, shapes (nao, n) and (nao, m)
    edges : ndarray of int, shape (n + 1,)
        First pair of each p, and the number of pairs. Pairs run p by p.
    """

    def __init__(self, one, other, compact=False):
        self.one, self.other, self.compact = one, other, compact
        counts = np.arange(1, one.shape[1] + 1) if compact else np.full(one.shape[1], other.shape[1])
        self.edges = np.concatenate([[0], np.cumsum(counts)])

    @property
    def pairs(self):
        """Number of pairs."""
        return int(self.edges[-1])

    def product_bytes(self, nao):
        """Bytes for the products of one matrix."""
        n, m = self.one.shape[1], self.other.shape[1]
        return 8 * (nao * min(n, m) + PRODUCTS * n * m)

    def chosen(self, first, last):
        """Places in [p][q] of the pairs of p from first to last - 1; None if they are all."""
        m = self.other.shape[1]
        if not self.compact:
            return None
        return np.concatenate([[], *(np.arange(p + 1) + (p - first) * m for p in range(first, last))]).astype(np.int64)


class FourIndex:
    """The integrals (pq|rs); errors are those of `md4.contract.transform.OneIndexOfEachSide`.

    Parameters
    ----------
    engine : md4.engine.Engine
        Its `bra_basis` is the basis. Threads may share it.
    bra : Side
    ket : Side, optional
        Of r and s. Without it, there are (pq|P) only.
    progress : bool, optional
        As in `md4.int2e`.
    """

    def __init__(self, engine, bra, ket=None, progress=None):
        self.engine, self.bra, self.ket, self.progress = engine, bra, ket, progress
        with engine.lock:
            self.algebra = engine.backend.algebra()
            with self.algebra.working():
                self.rows = PairRows(engine)
                self._plan()

    def sorted(self, coefficients):
        """As `OneIndexOfEachSide.sorted`."""
        return self.algebra.send(np.ascontiguousarray(coefficients[self.rows.order], dtype=float))

    # memory

    def _plan(self):
        """Where (pq|P) is kept, how many p and how many rows at once; MemoryLimitError if the least does not fit."""
        algebra, rows, nao = self.algebra, self.rows, self.rows.nao
        self.width = table_width(rows.nrow)
        self.matrix = 8 * nao * algebra.matrix_width(nao)
        of_ket = 0 if self.ket is None else self.ket.product_bytes(nao)
        products = max(self.bra.product_bytes(nao), of_ket)
        row = 8 * self.width + 16 * self.bra.pairs
        least = rows.workspace + 16 * nao**2 + self.matrix + products + max(rows.least_rows * row, 16 * self.width)
        one_p = 8 * self.width * int(np.diff(self.bra.edges).max(initial=1))
        left, whole = algebra.memory_left(), 8 * self.width * self.bra.pairs
        self.on_device = not algebra.has_host_memory or whole <= DEVICE_SHARE * (left - least)
        here = left - least if self.on_device else algebra.host_left()
        if least > left or one_p > here:
            raise MemoryLimitError(
                f"integrals over {self.bra.pairs} pairs of orbitals and {rows.nrow} of AOs take {size_text(one_p)} for "
                f"the first orbital, and with the least workspace {size_text(least + one_p)}, but {size_text(left)} "
                f"may be used, and {size_text(algebra.host_left())} of the host; raise max_memory."
            )
        kept = min(whole, max(one_p, (DEVICE_SHARE if self.on_device else HOST_SHARE) * here))
        self.pairs_at_once = int(kept // (8 * self.width))
        room = WORK_SHARE * (left - least - (kept if self.on_device else 0))
        longest = min(max(algebra.chunk_bytes, algebra.block_bytes), room / 2)
        self.rows_at_once = max(rows.least_rows, int(longest // row))
        self.matrices_at_once = max(1, int(min(algebra.block_bytes, room / 2) // (self.matrix + products)))

    # the first side

    def passes(self):
        """Yields (p, next p, (pq|P)) of ranges of p: an array (pairs, width) of the device or of the host.

        The caller holds the engine's lock, and calls it within ``with algebra.working():``.
        """
        edges, cuts = self.bra.edges, [0]
        while cuts[-1] < len(edges) - 1:
            furthest = np.searchsorted(edges, edges[cuts[-1]] + self.pairs_at_once, side="right") - 1
            cuts.append(int(max(cuts[-1] + 1, furthest)))
        pieces = self.rows.pieces(self.rows_at_once)
        self.rows.compile_ahead(True, self.progress)
        self.places = self.algebra.send(self.rows.places())
        work = float(max(1, self.rows.nrow) * max(1, len(cuts) - 1))
        with Progress(work, self.progress, label="MO") as bar:
            for first, last in pairwise(cuts):
                if edges[last] > edges[first]:
                    yield first, last, self._half(first, last, pieces, bar)

    def _half(self, first, last, pieces, bar):
        """(pq|P) for p from first to last - 1."""
        algebra, rows = self.algebra, self.rows
        shape = int(self.bra.edges[last] - self.bra.edges[first]), self.width
        table = algebra.empty(shape) if self.on_device else algebra.host_table(shape)
        table[:, rows.nrow :] = 0.0
        longest = max((stop - start for start, stop in pieces), default=0)
        made = algebra.empty((longest, self.width))
        made[:, rows.nrow :] = 0.0
        rows.store.fit(HERMITE_SHARE)
        sets = self.sorted(self.bra.one[:, first:last]), self.sorted(self.bra.other)
        chosen = self.bra.chosen(first, last)
        for start, stop in pieces:
            rows.integrals(start, stop, made[: stop - start], rows.nrow)
            for at, done in self._products(made[: stop - start], sets, chosen):
                columns = slice(start + at, start + at + done.shape[1])
                if self.on_device:
                    table[:, columns] = done
                else:
                    algebra.put_columns(algebra.xp.ascontiguousarray(done), table, columns.start)
                    algebra.await_copies()
            bar.update(stop - start)
        return table

    def _products(self, table, sets, chosen):
        """Yields (number of the first row, (pair, row)) of rows of a table, both of whose indices are transformed."""
        for at, done in transformed_rows(self.algebra, table, self.places, sets, self.matrices_at_once):
            pairs = done.transpose(0, 2, 1).reshape(-1, done.shape[1])
            yield at, pairs if chosen is None else pairs[self.algebra.send(chosen)]

    # the second side

    def integrals(self, put):
        """Calls put(first pair, (pq|rs)) for all ranges of pairs pq, arrays of the device of shape (pq, rs)."""
        if not self.bra.pairs * self.ket.pairs:
            return
        with self.engine.lock, self.algebra.working():
            sets, chosen = (self.sorted(self.ket.one), self.sorted(self.ket.other)), None
            chosen = self.ket.chosen(0, self.ket.one.shape[1])
            for first, _, table in self.passes():
                begin = int(self.bra.edges[first])
                for at, rows in self.row_blocks(table):
                    for more, done in self._products(rows, sets, chosen):
                        put(begin + at + more, done.T)
                del table

    def row_blocks(self, table):
        """Yields (first, rows on the device)."""
        most = self.rows_at_once
        cuts = [(first, min(first + most, len(table))) for first in range(0, len(table), most)]
        if self.on_device:
            yield from ((first, table[first:last]) for first, last in cuts)
        else:
            yield from self.algebra.row_blocks(table, cuts)
