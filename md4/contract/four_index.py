"""(pq|rs) over four sets of orbitals, one side after the other.

    (pq|P) = sum_mu,nu C[mu, p] C[nu, q] (mu nu|P)          for all rows P of `md4.contract.pair_rows`
    (pq|rs) = sum_lambda,sigma C[lambda, r] C[sigma, s] (pq|lambda sigma)

Rows P are complete, so each integral is made twice. (pq|P) of all P are kept in between, on the device or on the host;
where there is no memory for all p, ranges of p follow one another, each of which makes all integrals.
"""

from itertools import pairwise

import numpy as np

from md4.contract.fitting_stores import WORK_SHARE, row_blocks, table_width
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
    team : md4.contract.row_team.RowTeam
        Its devices share the rows P for the first side, and (pq|P) of pairs pq for the second.
    bra : Side
    ket : Side, optional
        Of r and s. Without it, there are (pq|P) only.
    progress : bool, optional
        As in `md4.int2e`.
    beside : int
        Bytes that will be allocated on the first device before the integrals are made.
    """

    def __init__(self, team, bra, ket=None, progress=None, beside=0):
        self.team, self.bra, self.ket, self.progress, self.algebra = team, bra, ket, progress, team.algebra
        self.beside = beside
        with team.engine.lock, self.algebra.working():
            self.rows = team.rows[0]
            self._plan()

    def sorted(self, coefficients):
        """As `OneIndexOfEachSide.sorted`."""
        return self.algebra.send(np.ascontiguousarray(coefficients[self.rows.order], dtype=float))

    # memory

    def _plan(self):
        """Where (pq|P) is kept, how many p and how many rows at once; MemoryLimitError if the least does not fit."""
        algebra, rows, nao = self.algebra, self.rows, self.rows.nao
        self.width = table_width(rows.nrow)
        matrix = 8 * nao * algebra.matrix_width(nao)
        of_ket = 0 if self.ket is None else self.ket.product_bytes(nao)
        products = max(self.bra.product_bytes(nao), of_ket)
        row = 8 * self.width + 16 * self.bra.pairs
        least = self.beside + rows.workspace + 16 * nao**2 + matrix + products
        least += max(rows.least_rows * row, 16 * self.width)
        one_p = 8 * self.width * int(np.diff(self.bra.edges).max(initial=1))
        left, whole, alone = self.team.memory_left(), 8 * self.width * self.bra.pairs, len(self.team.engines) == 1
        self.on_device = not algebra.has_host_memory or (alone and whole <= DEVICE_SHARE * (left - least))
        here = left - least if self.on_device else algebra.host_left()
        what = f"integrals over {self.bra.pairs} pairs of orbitals and {rows.nrow} of AOs take {size_text(one_p)} for "
        what += "the first orbital, and with the least workspace"
        if self.on_device:
            self.team.check_fits(least + one_p, what)
        elif least > left or one_p > here:
            raise MemoryLimitError(
                f"{what} {size_text(least + one_p)}, but {size_text(left)} may be used, and "
                f"{size_text(algebra.host_left())} of the host; raise max_memory."
            )
        kept = min(whole, max(one_p, (DEVICE_SHARE if self.on_device else HOST_SHARE) * here))
        self.pairs_at_once = int(kept // (8 * self.width))
        room = WORK_SHARE * (left - least - (kept if self.on_device else 0))
        self.rows_at_once, self.matrices_at_once = rows.at_once(algebra, room, row, matrix + products)

    # the first side

    def passes(self):
        """Yields (p, next p, (pq|P)) of ranges of p: an array (pairs, width) of the device or of the host.

        The caller holds the lock of `team.engine`, and calls it within ``with algebra.working():``.
        """
        edges, cuts = self.bra.edges, [0]
        while cuts[-1] < len(edges) - 1:
            furthest = np.searchsorted(edges, edges[cuts[-1]] + self.pairs_at_once, side="right") - 1
            cuts.append(int(max(cuts[-1] + 1, furthest)))
        pieces = self.rows.pieces(self.rows_at_once)
        self.team.compile_ahead(True, self.progress)
        work = float(max(1, self.rows.nrow) * max(1, len(cuts) - 1))
        with Progress(work, self.progress, label="MO") as bar:
            for first, last in pairwise(cuts):
                if edges[last] > edges[first]:
                    yield first, last, self._half(first, last, pieces, bar)

    def _half(self, first, last, pieces, bar):
        """(pq|P) for p from first to last - 1."""
        shape = int(self.bra.edges[last] - self.bra.edges[first]), self.width
        table = self.algebra.empty(shape) if self.on_device else self.algebra.host_table(shape)
        table[:, self.rows.nrow :] = 0.0
        costs = [stop - start for start, stop in pieces]
        self.team.deal(self, pieces, costs, lambda share, own: share._fill(table, first, last, own, bar))
        return table

    def _fill(self, table, first, last, pieces, bar):
        """Writes the columns of the pieces of a device."""
        algebra, rows = self.algebra, self.rows
        self.places = algebra.send(rows.places())
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
        rows.engine.backend.mark()()

    def _products(self, table, sets, chosen):
        """Yields (number of the first row, (pair, row)) of rows of a table, both of whose indices are transformed."""
        for at, done in transformed_rows(self.algebra, table, self.places, sets, self.matrices_at_once):
            pairs = done.transpose(0, 2, 1).reshape(-1, done.shape[1])
            yield at, pairs if chosen is None else pairs[self.algebra.send(chosen)]

    # the second side

    def integrals(self, put):
        """Calls put(algebra, first pair, (pq|rs)) for all ranges of pairs pq.

        (pq|rs) are arrays of the algebra of a device, of shape (pq, rs). Each device calls it in a thread of its own.
        """
        if not self.bra.pairs * self.ket.pairs:
            return
        with self.team.engine.lock, self.algebra.working():
            for first, _, table in self.passes():
                self._put_all(int(self.bra.edges[first]), table, put)
                del table

    def _put_all(self, begin, table, put):
        """`integrals` of a range of pairs, of which `begin` is the first."""
        cuts = self.cuts(table)
        costs = [stop - start for start, stop in cuts]
        self.team.deal(self, cuts, costs, lambda share, own: share._put(begin, table, own, put))

    def _put(self, begin, table, cuts, put):
        """The same of some blocks of (pq|P), by a device."""
        self.places, sets = self.algebra.send(self.rows.places()), [*map(self.sorted, (self.ket.one, self.ket.other))]
        chosen = self.ket.chosen(0, self.ket.one.shape[1])
        for at, rows in self.row_blocks(table, [*cuts]):
            if not cuts:  # another device has failed
                break
            for more, done in self._products(rows, sets, chosen):
                put(self.algebra, begin + at + more, done.T)

    def cuts(self, table):
        """(first, last) of blocks of rows of a table, at least one for each device."""
        most = min(self.rows_at_once, -(-len(table) // len(self.team.engines)))
        return [(first, min(first + most, len(table))) for first in range(0, len(table), most)]

    def row_blocks(self, table, cuts):
        """Yields (first, rows on the device)."""
        return row_blocks(self.algebra, table, cuts, not self.on_device)
