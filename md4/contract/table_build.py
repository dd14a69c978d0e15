"""J and K by density fitting from a table: blocks of its rows, one after the other.

K needs rows as matrices, unless the algebra makes products of the rows themselves. Where they are unpacked for one
density, rho_Q is made of them at the same time, so that J reads the table only once more: after K, which can be copied
to the host meanwhile. A table in host memory is copied to the device once a build, for both.
"""

from md4.contract.exchange_factors import add_exchange, half_of_rows, takes_rows
from md4.contract.fitting_stores import block_rows


def row_bytes(algebra, nao, width, columns):
    """Bytes for a row of B in K: copies of it of this width, the matrix, sums, and products with so many orbitals."""
    return 8 * (width + nao * (algebra.matrix_width(nao) + columns)) + algebra.sums_bytes(nao)


class TableBuild:
    """One build. `make_exchange` is called first, and `make_coulomb` after it.

    Parameters
    ----------
    table : md4.contract.fitting_stores.Table
    places : array of int64, shape (nao, nao)
        The column of each pair of AOs, on the device.
    request : md4.contract.density_fitting.Request
        J and K are added to it.

    Attributes
    ----------
    rho : array, shape (rows of the table,)
        rho_Q of one density, where K is made first; else None.
    has_coulomb : bool
        Whether J is complete, or nobody asked for it.
    """

    def __init__(self, table, places, request):
        self.table, self.places, self.request, self.algebra = table, places, request, table.algebra
        (self.size, self.width), self.nao = table.table.shape, len(places)
        self.has_coulomb, self.rho = not len(request.coulomb), None
        self.reads_once = table.kind == "host"

    def make_exchange(self):
        """Adds to K; also to J where the table is read once."""
        request, algebra = self.request, self.algebra
        if not request.exchange or not self.size:
            return
        ranks = [max((f.rank for f in request.exchange if len(f.sides) > n), default=0) for n in range(2)]
        most = block_rows(algebra, row_bytes(algebra, self.nao, self.table.copies, sum(ranks)))
        most = -(-self.size // -(-self.size // most))  # blocks of about the same size
        packed = takes_rows(algebra, self.nao, [side for f in request.exchange for side in f.sides])
        dense = None if packed else algebra.empty((most, self.nao, algebra.matrix_width(self.nao)))
        work = [algebra.empty((most * self.nao * max(1, rank),)) for rank in ranks]
        if len(request.coulomb) == 1 and not self.reads_once and not packed:
            self.rho = algebra.empty((self.size,))
        for first, rows in self.table.blocks(0, self.size, most):
            block = None if packed else self.matrices(first, rows, dense[: len(rows)])
            if self.reads_once and not self.has_coulomb:
                add_coulomb(request, rows, algebra)
            for k, f in zip(request.k, request.exchange):
                if f.rank:
                    self.add_block(k, rows, block, f, work)
        self.has_coulomb = self.has_coulomb or self.reads_once

    def matrices(self, first, rows, out):
        """Rows of the table, from number `first` on, as matrices in `out`; their rho_Q as well where it is wanted."""
        if self.rho is None:
            return self.algebra.unpack(rows, self.places, out)
        density = self.request.symmetric
        made, self.rho[first : first + len(rows)] = self.algebra.unpack_and_sum(rows, self.places, out, density)
        return made

    def add_block(self, k, rows, block, f, work):
        """Adds to K what rows of the tensor are of it; `block` has their matrices where these are needed."""
        made = [half_of_rows(self.algebra, rows, self.places, block, side, out) for side, out in zip(f.sides, work)]
        positive = len(rows) * f.negative  # the first row of them
        for these, sign in ((slice(0, positive), -1.0), (slice(positive, None), 1.0)):
            parts = [side[these] for side in made]
            if len(parts[0]):
                add_exchange(self.algebra, k, parts[0], parts[-1], sign)

    def make_coulomb(self):
        """Adds to J, unless that is done."""
        request, algebra = self.request, self.algebra
        if self.has_coulomb or not self.size:
            return
        most = block_rows(algebra, 8 * (1 + self.reads_once) * self.width, algebra.block_bytes // 4)
        for first, rows in self.table.blocks(0, self.size, most):
            if self.rho is None:
                add_coulomb(request, rows, algebra)
            else:
                algebra.add_times(rows.T, self.rho[first : first + len(rows)], request.j[0])
        self.has_coulomb = True


def add_coulomb(request, rows, algebra):
    """Adds to J what rows of the tensor are of it; for one density, a vector, these are read faster than for more."""
    if len(request.coulomb) == 1:
        rho = algebra.add_times(rows, request.coulomb[0], algebra.xp.zeros(len(rows)))
        algebra.add_times(rows.T, rho, request.j[0])
    else:
        rho = algebra.product(request.coulomb, rows.T, algebra.xp.empty((len(request.coulomb), len(rows))))
        algebra.product(rho, rows, request.j, add=True)
