"""J and K by density fitting without a table: the integrals are made anew in each build, column by column.

    X[P, i, o] = sum_j (P|ij) L_jo         the sum over all columns of a density's factors L and R
    B_Q L_o = sum_P W[Q, P] X[P, :, o]     from which K is made as with a table
    rho_P = sum_kl (P|kl) D_lk

J takes the integrals a second time, J_ij = sum_P (P|ij) (W^T W rho)_P. K needs as many passes as the X of all orbitals
has parts that fit into memory. Several workers divide the columns for J, and orbitals for K
(`md4.contract.fitting_team`).
"""

import numpy as np

from md4.contract.exchange_factors import add_exchange
from md4.contract.fitting_stores import WORK_SHARE, block_rows
from md4.errors import MemoryLimitError
from md4.support.display import size_text


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
        xp, request = self.algebra.xp, self.request
        if not len(rho):
            return
        fitted = self.metric.apply(xp.ascontiguousarray(rho.T))
        fitted = xp.ascontiguousarray(self.metric.apply_transposed(xp.ascontiguousarray(fitted)).T)
        for start, stop, chunk in self.columns.chunks(self.own):
            request.j[:, start:stop] = xp.matmul(fitted, chunk)

    def groups(self, exchange):
        """Lists of (number of the density, some of its columns) whose half-transformed integrals fit into memory."""
        column = 8 * self.three.naux * self.three.nao
        left = self.algebra.memory_left() - self.columns.least_bytes
        budget = int(WORK_SHARE * left) // column
        least = 2 if any(not f.symmetric for f in exchange) else 1
        if exchange and budget < least:
            raise MemoryLimitError(
                f"K with store='direct' needs {size_text(least * column / WORK_SHARE)} for one orbital at least, but "
                f"{size_text(max(0, left))} may be used; raise max_memory."
            )
        groups, room = [], 0
        for number, f in enumerate(exchange):
            sides, first = 1 if f.symmetric else 2, 0
            while first < f.rank:
                if room < sides:
                    groups.append([])
                    room = budget
                count = min(f.rank - first, room // sides)
                groups[-1].append((number, f[first : first + count]))
                first, room = first + count, room - sides * count
        return groups

    def one_pass(self, group, rho):
        """Adds K of a group, and to rho_P, shape (n_j, naux), if it is given; one pass through the integrals.

        Without a group the pass is one through the own columns.
        """
        xp, nao, naux = self.algebra.xp, self.three.nao, self.three.naux
        vectors = [side for _, f in group for side in ([f.left] if f.symmetric else [f.left, f.right])]
        vectors = xp.concatenate(vectors, axis=1) if vectors else xp.zeros((nao, 0))
        half = self.algebra.empty((naux, nao, vectors.shape[1])) if group else None
        if group:
            half[...] = 0.0
        first, last = self.own
        ranges = [(0, first), self.own, (last, self.three.ncol)] if group else [self.own]
        for start, stop, chunk in self.columns.chunks(*ranges):
            if rho is not None and first <= start < last:
                rho += xp.matmul(self.request.coulomb[:, start:stop], chunk.T)
            if group:
                self.add_half_transformed(chunk, start, stop, vectors, half)
        if not group:
            return
        half = self.metric.apply(half.reshape(naux, -1)).reshape(self.metric.size, nao, -1)
        self.add_group(group, half)

    def add_half_transformed(self, chunk, start, stop, vectors, half):
        """Adds what columns (P|ij) from start to stop are of (P|i L) = sum_j (P|ij) L_j, of all i and j."""
        rows, cols = self.three.rows[start:stop], self.three.cols[start:stop]
        once = self.three.weights[start:stop] == 2.0  # (j, i) is no column of its own
        self.add_one_side(chunk, rows, cols, np.arange(len(rows)), vectors, half)
        if once.any():
            self.add_one_side(chunk, cols[once], rows[once], np.flatnonzero(once), vectors, half)

    def add_one_side(self, chunk, left, right, columns, vectors, half):
        """Adds sum_j (P|ij) L_j to `half` for columns of a chunk with i = left and j = right."""
        xp, algebra = self.algebra.xp, self.algebra
        i, i_place = np.unique(left, return_inverse=True)
        j, j_place = np.unique(right, return_inverse=True)
        places, there = np.zeros((len(i), len(j)), dtype=np.int64), np.zeros((len(i), len(j)))
        places[i_place, j_place], there[i_place, j_place] = columns, 1.0
        places, mask = algebra.send(places), None if there.all() else algebra.send(there)
        i = slice(int(i[0]), int(i[-1]) + 1) if i[-1] - i[0] == len(i) - 1 else algebra.send(i)
        some = vectors[algebra.send(j)]
        shape = places.shape[0], vectors.shape[1]
        most = min(len(chunk), block_rows(algebra, 8 * (places.size + shape[0] * shape[1])))
        dense, sums = algebra.empty((most, *places.shape)), algebra.empty((most, *shape))
        for first in range(0, len(chunk), most):
            these, count = slice(first, first + most), len(chunk[first : first + most])
            block = algebra.gather(chunk[these], places, dense[:count])
            if mask is not None:
                block *= mask
            made = sums[:count]
            xp.matmul(block.reshape(-1, block.shape[2]), some, out=made.reshape(-1, shape[1]))
            half[these, i] += made

    def add_group(self, group, half):
        """Adds K of a group from the products B_Q L, shape (size, nao, n), in blocks of rows."""
        xp, nao = self.algebra.xp, self.three.nao
        most = block_rows(self.algebra, 16 * nao * half.shape[2])
        for first in range(0, len(half), most):
            rows, column = half[first : first + most], 0
            for number, f in group:
                sides = []
                for _ in range(1 if f.symmetric else 2):
                    part = rows[:, :, column : column + f.rank]
                    sides.append(xp.ascontiguousarray(part.transpose(1, 0, 2)).reshape(nao, -1))
                    column += f.rank
                right = sides[-1]
                if f.signs is not None:
                    right = (right.reshape(nao, -1, f.rank) * f.signs).reshape(nao, -1)
                add_exchange(self.request.k[number], sides[0], right, xp)
