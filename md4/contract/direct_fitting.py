"""J and K by density fitting without a table: the integrals are made anew in each build, column by column.

    X[P, o, i] = sum_j (P|ij) L_jo         the sum over all columns of a density's factors L and R
    B_Q L_o = sum_P W[Q, P] X[P, o, :]     from which K is made as with a table
    rho_P = sum_kl (P|kl) D_lk

J takes the integrals a second time, J_ij = sum_P (P|ij) (W^T W rho)_P. K needs as many passes as the X of all orbitals
has parts that fit into memory. Several workers divide the columns for J, and orbitals for K
(`md4.contract.fitting_team`).
"""

import numpy as np

from md4.contract.exchange_factors import add_exchange, half_transformed
from md4.contract.fitting_stores import WORK_SHARE, block_rows, parts_within, zeros


class DirectBuild:
    """One build.

    Parameters
    ----------
    columns : md4.contract.fitting_stores.Columns
    request : md4.contract.density_fitting.Request
        J and K are added to it.
    own : (int, int), optional
        Columns of which rho and J are made, between edges; all by default.
    """

    def __init__(self, columns, request, own=None):
        self.columns, self.request, self.own = columns, request, own or (0, columns.three.ncol)
        self.algebra, self.metric, self.three = columns.algebra, columns.metric, columns.three

    def run(self):
        """Makes J and K."""
        self.second_pass(self.first_passes())

    def first_passes(self):
        """Makes K, and returns rho_P of the own columns, shape (n_j, naux)."""
        rho = self.algebra.xp.zeros((len(self.request.coulomb), self.three.naux))
        groups = self.groups(self.request.exchange)
        if len(rho) and not groups:
            self.one_pass([], rho)
        for n, group in enumerate(groups):
            self.one_pass(group, rho if n == 0 and len(rho) else None)
        return rho

    def second_pass(self, rho):
        """Makes the own columns of J from the rho_P of all columns."""
        algebra, xp, request = self.algebra, self.algebra.xp, self.request
        if not len(rho):
            return
        fitted = self.metric.apply(xp.ascontiguousarray(rho.T))
        fitted = xp.ascontiguousarray(self.metric.apply_transposed(xp.ascontiguousarray(fitted)).T)
        for start, stop, chunk in self.columns.chunks(self.own):
            algebra.product(fitted, chunk, request.j[:, start:stop])

    def groups(self, exchange):
        """Lists of (number of the density, some of its columns) whose half-transformed integrals fit into memory.

        All columns of one have the same sign.
        """
        column = 8 * self.three.naux * self.three.nao
        least = 2 if any(not f.symmetric for f in exchange) else 1
        if exchange:
            need = self.columns.least_bytes + least * column / WORK_SHARE
            self.algebra.check_fits(need, "with store='direct', K of one orbital needs at least")
        budget = int(WORK_SHARE * (self.algebra.memory_left() - self.columns.least_bytes)) // column
        ranges = [
            (number, *ends, len(f.sides))
            for number, f in enumerate(exchange)
            for ends in ((0, f.negative), (f.negative, f.rank))
        ]
        return [
            [(number, exchange[number][first:last]) for number, first, last in group]
            for group in parts_within(ranges, budget)
        ]

    def one_pass(self, group, rho):
        """Adds K of a group, and to rho_P, shape (n_j, naux), if it is given; one pass through the integrals.

        Without a group the pass is one through the own columns.
        """
        nao, naux, request = self.three.nao, self.three.naux, self.request
        sides = [side for _, f in group for side in f.sides]
        halves = [zeros(self.algebra, (naux, side.shape[1], nao)) for side in sides]
        first, last = self.own
        ranges = [(0, first), self.own, (last, self.three.ncol)] if group else [self.own]
        for start, stop, chunk in self.columns.chunks(*ranges):
            if rho is not None and first <= start < last:
                self.algebra.product(request.coulomb[:, start:stop], chunk.T, rho, add=True)
            if group:
                self.add_half_transformed(chunk, start, stop, sides, halves)
        made = iter(self.metric.apply(half.reshape(naux, -1)).reshape(-1, nao) for half in halves)
        for number, f in group:
            parts = [next(made) for _ in f.sides]
            add_exchange(self.algebra, request.k[number], parts[0], parts[-1], -1.0 if f.negative else 1.0)

    def add_half_transformed(self, chunk, start, stop, sides, halves):
        """Adds what columns (P|ij) from start to stop are of sum_j (P|ij) L_jo, of all i and j."""
        rows, cols = self.three.rows[start:stop], self.three.cols[start:stop]
        once = self.three.weights[start:stop] == 2.0  # (j, i) is no column of its own
        self.add_one_side(chunk, rows, cols, np.arange(len(rows)), sides, halves)
        if once.any():
            self.add_one_side(chunk, cols[once], rows[once], np.flatnonzero(once), sides, halves)

    def add_one_side(self, chunk, left, right, columns, sides, halves):
        """Adds sum_j (P|ij) L_jo to X of each L for columns of a chunk with i = left and j = right."""
        algebra = self.algebra
        i, i_place = np.unique(left, return_inverse=True)
        j, j_place = np.unique(right, return_inverse=True)
        places, there = np.zeros((len(i), len(j)), dtype=np.int64), np.zeros((len(i), len(j)))
        places[i_place, j_place], there[i_place, j_place] = columns, 1.0
        places, mask = algebra.send(places), None if there.all() else algebra.send(there)
        i = slice(int(i[0]), int(i[-1]) + 1) if i[-1] - i[0] == len(i) - 1 else algebra.send(i)
        rank, j = max(side.shape[1] for side in sides), algebra.send(j)
        copies = 1 if isinstance(i, slice) else 2  # what the sums are added to is copied where i has gaps
        most = min(len(chunk), block_rows(algebra, 8 * (places.size + copies * places.shape[0] * rank)))
        dense, sums = algebra.empty((most, *places.shape)), algebra.empty((most * places.shape[0] * rank,))
        copy = algebra.empty(sums.shape) if copies == 2 else None
        for first in range(0, len(chunk), most):
            these = slice(first, first + most)
            block = algebra.gather(chunk[these], places, dense[: len(chunk[these])])
            if mask is not None:
                block *= mask
            for side, half in zip(sides, halves):
                made = half_transformed(algebra, block, side[j], sums).reshape(-1, *block.shape[:2])
                if copy is None:
                    half[these, :, i] += made.transpose(1, 0, 2)
                    continue
                there = algebra.gather(half[these].reshape(-1, half.shape[2]), i, copy[: made.size].reshape(-1, len(i)))
                there = there.reshape(len(block), -1, len(i))
                there += made.transpose(1, 0, 2)
                half[these, :, i] = there
