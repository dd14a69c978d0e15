"""J and K by density fitting: products of matrices with the three-centre tensor B.

    (ij|kl) ~ sum_Q B[Q, ij] B[Q, kl] ,    B[Q, ij] = sum_P W[Q, P] (P|ij) ,    W^T W = (P|Q)^-1

    J_ij = sum_Q B[Q, ij] rho_Q ,          rho_Q = sum_kl B[Q, kl] D_lk
    K_il = sum_Qo s_o (B_Q L_o)_i (B_Q R_o)_l             D = sum_o s_o L_o R_o^T

W is of `md4.contract.metric`, B is kept by `md4.contract.fitting_stores`, and L and R are of
`md4.contract.exchange_factors`. From a table, all is made in blocks of its rows. Without a table, chunks of columns
(P|ij) are made anew in each build: B_Q L_o = sum_P W[Q, P] (P|i L_o) is then summed first and multiplied by W last, and
J takes the integrals a second time, with sum_Q W[Q, P] rho_Q.
"""

import time
from dataclasses import dataclass

import numpy as np

from md4.contract.densities import checked_densities
from md4.contract.exchange_factors import factors
from md4.contract.fitting_stores import STORES, WORK_SHARE, Columns, Table, chosen_store
from md4.contract.metric import Metric
from md4.contract.three_centre import ThreeCentre
from md4.errors import MemoryLimitError
from md4.support.arguments import checked_choice
from md4.support.display import size_text
from md4.support.locks import Lock, locked
from md4.support.log import log

# Pairs of AOs whose Schwarz bound with every auxiliary function is below this (Hartree) are left out.
CUTOFF = 1e-13


@dataclass
class Request:
    """What a build makes, on the device.

    Attributes
    ----------
    coulomb : array, shape (n_j, ncol + 1)
        Symmetric parts of densities as rows over the columns, times their weights. There are none without J.
    exchange : list of Factors
        Of the densities whose K is asked for.
    j : array, shape (n_j, ncol + 1)
    k : array, shape (n_k, nao, nao)
    """

    coulomb: object
    exchange: list
    j: object
    k: object


class DensityFitting:
    """J and K of a basis with an auxiliary basis, for one operator.

    Threads may share an object. Then their calls run one after the other.

    Parameters
    ----------
    basis, auxiliary : Basis
    operator : Operator, optional
    backend, stream, max_memory, device
        As for `md4.Engine`.
    store : {'auto', 'device', 'host', 'direct'}
        Where B is kept: on the device (on the CPU this is host memory), in pinned host memory, from which it is copied
        beside the products, or nowhere, so that each build makes the integrals anew. 'auto' takes the first one that
        fits.
    cutoff : float
        Hartree. Pairs of shells are left out whose Schwarz bound with every auxiliary function is below it.

    Attributes
    ----------
    three : ThreeCentre
    metric : Metric
    store : str
        What was chosen.
    size : int
        Number of rows of B: of the auxiliary functions, fewer if these are linearly dependent.

    Raises
    ------
    ArgumentError, BasisError
    DeviceError
        A GPU without CuPy.
    MemoryLimitError
        The tensor or the least workspace does not fit.
    """

    def __init__(
        self, basis, auxiliary, operator=None, backend="auto", stream=None, max_memory=None, device=None, store="auto",
        cutoff=CUTOFF, progress=None,
    ):  # fmt: skip
        checked_choice("store", store, STORES)
        start = time.perf_counter()
        self.lock, self.nao = Lock(), basis.nao
        self.three = three = ThreeCentre(basis, auxiliary, operator, backend, stream, max_memory, device, cutoff)
        with self.engine.lock:
            self.algebra = self.engine.backend.algebra()
            with self.algebra.working():
                three.compile_ahead(progress)
                self._check_metric_memory()
                self.metric = Metric(self._sorted_metric(), self.algebra)
                self._make_places()
                self.columns = Columns(three, self.metric, self.algebra)
                shape = self.metric.size, three.ncol
                work = max(self.columns.least_bytes(), self._row_bytes(self.nao))
                self.store = chosen_store(store, self.algebra, shape, work)
                self.table = None if self.store == "direct" else Table(self.columns, self.store)
                self.engine.backend.mark()()
        log.info(
            "density fitting: %d auxiliary functions, %d of %d pairs of AOs, metric by %s, tensor of %s %s, %.2f s",
            three.naux, three.ncol, self.nao**2, self.metric.how, size_text(8 * self.size * three.ncol),
            {"device": "in memory of the backend", "host": "in host memory", "direct": "made in each build"}[self.store],
            time.perf_counter() - start,
        )  # fmt: skip

    @property
    def engine(self):
        return self.three.engine

    @property
    def size(self):
        return self.metric.size

    @property
    def nbytes(self):
        """Bytes that are kept between builds."""
        return 8 * self.three.naux * self.size + (0 if self.table is None else self.table.table.nbytes)

    # set-up

    def _check_metric_memory(self):
        """The metric, its factor, and what a factorisation needs."""
        need, left = 24 * self.three.naux**2, self.algebra.memory_left()
        if need > left:
            raise MemoryLimitError(
                f"the metric of {self.three.naux} auxiliary functions and its factors take {size_text(need)}, but "
                f"{size_text(left)} may be used; raise max_memory."
            )

    def _sorted_metric(self):
        """(P|Q) in the order of the auxiliary basis."""
        places = self.algebra.send(np.argsort(self.three.auxiliary_order))
        xp = self.algebra.xp
        lower = xp.tril(self.algebra.wrapped(self.three.metric()))  # what is above is not written
        metric = lower + xp.tril(lower, -1).T
        return xp.ascontiguousarray(metric[places][:, places])

    def _make_places(self):
        """The column of each pair (i, j): `places`, shape (nao, nao), and its lower triangle, row by row."""
        three, nao = self.three, self.nao
        places = np.full((nao, nao), three.ncol)
        places[three.cols, three.rows] = places[three.rows, three.cols] = np.arange(three.ncol)
        self.places = self.algebra.send(places)
        self.triangle = self.algebra.send(places[np.tril_indices(nao)])

    # J and K

    @locked
    def get_jk(self, dm, hermi=1, with_j=True, with_k=True, orbitals=None):
        """J and K of density matrices.

        Parameters
        ----------
        dm : array_like, shape (nao, nao) or (n, nao, nao)
            Real or complex.
        hermi : {0, 1, 2}
            As for `md4.JK.get_jk`; the matrices are looked at, so it does not matter.
        with_j, with_k : bool
        orbitals : list of (coefficients, occupations), optional
            One for each matrix, shapes (nao, nmo) and (nmo,), or None. They are used where they make up the matrix.

        Returns
        -------
        vj, vk : ndarray of dm's shape, in Hartree; None if not requested

        Raises
        ------
        ArgumentError
            Density matrices that cannot be used.
        MemoryLimitError
            The least workspace does not fit.
        """
        with self.engine.lock, self.algebra.working():
            dm, shape = checked_densities(dm, hermi, self.nao)
            if not np.iscomplexobj(dm):
                vj, vk = self._real(dm, with_j, with_k, orbitals)
            else:
                parts = self._real(np.concatenate([dm.real, dm.imag]), with_j, with_k, None)
                vj, vk = (None if v is None else v[: len(dm)] + 1j * v[len(dm) :] for v in parts)
        return tuple(None if v is None else v.reshape(shape) for v in (vj, vk))

    def _real(self, dm, with_j, with_k, orbitals):
        """J and K of real matrices, shape (n, nao, nao), on the host."""
        nao, width = self.nao, self.three.ncol + 1
        orbitals = [None] * len(dm) if orbitals is None else orbitals
        self._check_densities(len(dm), with_j, with_k)
        coulomb = self._zeros((len(dm) if with_j else 0, width))
        if with_j:
            rows, cols, weights = self.three.rows, self.three.cols, self.three.weights
            for row, matrix in zip(coulomb, dm):
                row[:-1] = self.algebra.send(weights * (matrix[rows, cols] + matrix[cols, rows]) / 2)
        exchange = []
        if with_k:
            exchange = [factors(d, self.algebra, o) for d, o in zip(dm, orbitals)]
        request = Request(coulomb, exchange, self._zeros(coulomb.shape), self._zeros((len(exchange), nao, nao)))
        if self.table is None:
            self._direct(request)
        else:
            self._from_table(request)
        vj = self.algebra.fetch(request.j[:, self.places]) if with_j else None
        vk = self.algebra.fetch(request.k) if with_k else None
        return vj, vk

    def _zeros(self, shape):
        made = self.algebra.empty(shape)
        made[...] = 0.0
        return made

    def _check_densities(self, count, with_j, with_k):
        """MemoryLimitError if there is no memory for densities, J and K."""
        need = 8 * count * (2 * with_j * (self.three.ncol + 1) + (with_j + 3 * with_k) * self.nao**2)
        left = self.algebra.memory_left()
        if need > left:
            raise MemoryLimitError(
                f"{count} density matrices of {self.nao} AOs, their J and K take {size_text(need)}, but "
                f"{size_text(left)} may be used; raise max_memory or give fewer at once."
            )

    def _row_bytes(self, rank):
        """Bytes for a row of B in K: the row itself, the matrix it stands for, and products with `rank` columns."""
        return 8 * (self.three.ncol + 1 + self.nao * (self.nao + 4 * rank))

    def _block_rows(self, row_bytes):
        """How many rows a block has; MemoryLimitError if there is no memory for one."""
        left = self.algebra.memory_left()
        if row_bytes > left:
            raise MemoryLimitError(
                f"K of {self.nao} AOs by density fitting needs {size_text(row_bytes)} for each auxiliary function at "
                f"least, but {size_text(left)} may be used; raise max_memory or use store='direct'."
            )
        return max(1, int(min(self.algebra.block_bytes, WORK_SHARE * left) // row_bytes))

    def _from_table(self, request):
        """J and K from blocks of rows of the table."""
        rank = max((f.rank for f in request.exchange), default=0)
        most = self._block_rows(self._row_bytes(rank) if request.exchange else 8 * (self.three.ncol + 1))
        most = min(most, self.size)
        xp, algebra, nao = self.algebra.xp, self.algebra, self.nao
        dense = algebra.empty((most, nao, nao)) if request.exchange else None
        work = [algebra.empty((most * nao * max(1, rank),)) for _ in range(4)] if request.exchange else []
        for _, rows in self.table.blocks(0, self.size, most):
            if len(request.coulomb):
                request.j += xp.matmul(xp.matmul(request.coulomb, rows.T), rows)
            if request.exchange:
                block = algebra.gather(rows, self.places, dense[: len(rows)])
                for k, f in zip(request.k, request.exchange):
                    if f.rank:
                        add_exchange(k, *half_transformed(xp, block, f, work), xp)

    # without a table

    def _direct(self, request):
        """J and K from integrals that are made anew, in as many passes as there is memory for."""
        xp, naux = self.algebra.xp, self.three.naux
        rho = xp.zeros((len(request.coulomb), naux))
        first = True
        for group in self._groups(request.exchange) or [[]]:
            self._direct_pass(request, group, rho if first and len(rho) else None)
            first = False
        if not len(rho):
            return
        fitted = self.metric.apply(xp.ascontiguousarray(rho.T))
        fitted = xp.ascontiguousarray(self.metric.apply_transposed(xp.ascontiguousarray(fitted)).T)
        for start, stop, chunk in self.columns.chunks():
            request.j[:, start:stop] = xp.matmul(fitted, chunk)

    def _groups(self, exchange):
        """Lists of (number of the density, some of its columns) whose half-transformed integrals fit into memory."""
        column = 8 * self.three.naux * self.nao
        left = self.algebra.memory_left() - 2 * self.columns.least_bytes()
        budget = int(WORK_SHARE * left) // column
        least = 2 if any(not f.symmetric for f in exchange) else 1
        if exchange and budget < least:
            raise MemoryLimitError(
                f"K with store='direct' needs {size_text(least * column / WORK_SHARE)} for one orbital of {self.nao} AOs "
                f"with {self.three.naux} auxiliary functions, but {size_text(max(0, left))} may be used; raise max_memory."
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

    def _direct_pass(self, request, group, rho):
        """Adds K of a group, and to rho_P, shape (n_j, naux), if it is given; one pass through the integrals."""
        xp, nao, naux = self.algebra.xp, self.nao, self.three.naux
        vectors = [side for _, f in group for side in ([f.left] if f.symmetric else [f.left, f.right])]
        vectors = xp.concatenate(vectors, axis=1) if vectors else xp.zeros((nao, 0))
        half = self.algebra.empty((naux, nao, vectors.shape[1])) if group else None
        if group:
            half[...] = 0.0
        for start, stop, chunk in self.columns.chunks():
            if rho is not None:
                rho += xp.matmul(request.coulomb[:, start:stop], chunk.T)
            if group:
                self._add_half_transformed(chunk, start, stop, vectors, half)
        if not group:
            return
        half = self.metric.apply(half.reshape(naux, -1)).reshape(self.size, nao, -1)
        self._add_group(request.k, group, half)

    def _add_half_transformed(self, chunk, start, stop, vectors, half):
        """Adds what columns (P|ij) from start to stop are of (P|i L) = sum_j (P|ij) L_j, of all i and j."""
        rows, cols = self.three.rows[start:stop], self.three.cols[start:stop]
        once = self.three.weights[start:stop] == 2.0  # (j, i) is no column of its own
        self._add_one_side(chunk, rows, cols, np.arange(len(rows)), vectors, half)
        if once.any():
            self._add_one_side(chunk, cols[once], rows[once], np.flatnonzero(once), vectors, half)

    def _add_one_side(self, chunk, left, right, columns, vectors, half):
        """Adds sum_j (P|ij) L_j to `half` for columns of a chunk with i = left and j = right."""
        xp, algebra = self.algebra.xp, self.algebra
        i, i_place = np.unique(left, return_inverse=True)
        j, j_place = np.unique(right, return_inverse=True)
        places, there = np.zeros((len(i), len(j)), dtype=np.int64), np.zeros((len(i), len(j)))
        places[i_place, j_place], there[i_place, j_place] = columns, 1.0
        places, mask = algebra.send(places), None if there.all() else algebra.send(there)
        i = slice(int(i[0]), int(i[-1]) + 1) if i[-1] - i[0] == len(i) - 1 else algebra.send(i)
        some = vectors[algebra.send(j)]
        most = max(1, int(self.algebra.block_bytes // (8 * places.size)))
        dense = algebra.empty((min(most, len(chunk)), *places.shape))
        for first in range(0, len(chunk), most):
            these = slice(first, first + most)
            block = algebra.gather(chunk[these], places, dense[: len(chunk[these])])
            if mask is not None:
                block *= mask
            half[these, i] += xp.matmul(block, some)

    def _add_group(self, k, group, half):
        """Adds K of a group from the products B_Q L, shape (size, nao, n), in blocks of rows."""
        xp, nao = self.algebra.xp, self.nao
        most = self._block_rows(16 * nao * half.shape[2])
        for first in range(0, self.size, most):
            rows, column = half[first : first + most], 0
            for number, f in group:
                sides = []
                for _ in range(1 if f.symmetric else 2):
                    part = rows[:, :, column : column + f.rank]
                    sides.append(xp.ascontiguousarray(part.transpose(1, 0, 2)).reshape(nao, -1))
                    column += f.rank
                right = sides[-1] if f.signs is None else (sides[-1].reshape(nao, -1, f.rank) * f.signs).reshape(nao, -1)
                add_exchange(k[number], sides[0], right, xp)

    # rows of B

    @locked
    def rows(self, first, last):
        """Rows of B from first to last as PySCF has them: shape (last - first, nao (nao + 1) / 2), lower triangles."""
        out = np.zeros((last - first, self.nao * (self.nao + 1) // 2))
        with self.engine.lock, self.algebra.working():
            if self.table is None:
                self._direct_rows(first, last, out)
                return out
            most = self._block_rows(8 * (self.three.ncol + 1 + out.shape[1]))
            for start, rows in self.table.blocks(first, last, most):
                self.algebra.gather_to_host(rows, self.triangle, out[start - first : start - first + len(rows)])
        return out

    def _direct_rows(self, first, last, out):
        """Rows of B, from a pass through all integrals."""
        i, j = np.maximum(self.three.rows, self.three.cols), np.minimum(self.three.rows, self.three.cols)
        place = i * (i + 1) // 2 + j
        once = (self.three.weights == 2.0) | (self.three.rows >= self.three.cols)
        for start, stop, part in self.columns.solved():
            some = once[start:stop]
            out[:, place[start:stop][some]] = self.algebra.fetch(part[first:last])[:, some]


def half_transformed(xp, block, f, work):
    """B_Q L and B_Q R with the signs, both as (nao, Q o), in memory of `work`; one array twice where they are the same.

    Parameters
    ----------
    block : array, shape (rows, nao, nao)
    f : Factors
    work : list of arrays
        Four of rows * nao * rank numbers at least.
    """
    rows, nao, _ = block.shape
    size, shape = rows * nao * f.rank, (nao, rows, f.rank)

    def one(vectors, n):
        made = work[n][:size].reshape(rows * nao, f.rank)
        xp.matmul(block.reshape(rows * nao, nao), vectors, out=made)
        turned = work[n + 1][:size].reshape(shape)
        turned[...] = made.reshape(rows, nao, f.rank).transpose(1, 0, 2)
        return turned

    left = one(f.left, 0)
    right = left if f.symmetric else one(f.right, 2)
    if f.signs is not None:
        right = xp.multiply(left, f.signs, out=work[0][:size].reshape(shape))
    return left.reshape(nao, -1), right.reshape(nao, -1)


def add_exchange(k, left, right, xp):
    """Adds left right^T to K."""
    k += xp.matmul(left, right.T)
