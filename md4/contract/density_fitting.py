"""J and K by density fitting: products of matrices with the three-centre tensor B.

    (ij|kl) ~ sum_Q B[Q, ij] B[Q, kl] ,    B[Q, ij] = sum_P W[Q, P] (P|ij) ,    W^T W = (P|Q)^-1

    J_ij = sum_Q B[Q, ij] rho_Q ,          rho_Q = sum_kl B[Q, kl] D_lk
    K_il = sum_Qo s_o (B_Q L_o)_i (B_Q R_o)_l             D = sum_o s_o L_o R_o^T

W is of `md4.contract.metric`, B is kept by `md4.contract.fitting_stores`, and L and R are of
`md4.contract.exchange_factors`. `md4.contract.table_build` makes J and K from a table, `md4.contract.direct_fitting`
without one.
"""

import time
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from md4.contract.densities import by_parts, checked_densities, not_finite
from md4.contract.direct_fitting import DirectBuild
from md4.contract.exchange_factors import complete_exchange, factors
from md4.contract.fitting_orbitals import ROWS, least_bytes, rows_into, transform
from md4.contract.fitting_stores import STORES, Columns, Table, block_rows, chosen_store, table_width, zeros
from md4.contract.metric import Metric, metric_bytes
from md4.contract.table_build import TableBuild, row_bytes
from md4.contract.three_centre import ThreeCentre
from md4.support.arguments import checked_choice
from md4.support.display import size_text
from md4.support.locks import Lock, locked
from md4.support.log import log
from md4.support.memory import host_array

# Pairs of AOs whose Schwarz bound with every auxiliary function is below this (Hartree) are left out.
CUTOFF = 1e-13
# Rows of the tensor that builds have room for at once where md4 chooses the store.
ROWS_BY_ITSELF = 16
# For the log.
WHERE = {"device": "in the memory of the backend", "host": "in host memory", "direct": "made in each build"}


@dataclass
class Request:
    """What a build makes, on the device.

    Attributes
    ----------
    coulomb : array, shape (n_j, width of a table)
        Symmetric parts of densities as rows over the columns, times their weights. There are none without J.
    symmetric : array, shape (nao, nao)
        The symmetric part of the last density; None without J.
    exchange : list of Factors
        Of the densities whose K is asked for; there are none without K.
    j : array, of the shape of `coulomb`
    k : array, shape (n_k, nao, nao)
    """

    coulomb: object
    symmetric: object
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
        self.lock, self.nao, self.asked = Lock(), basis.nao, store
        self.three = ThreeCentre(basis, auxiliary, operator, backend, stream, max_memory, device, cutoff)
        with self.engine.lock:
            self.algebra = self.engine.backend.algebra()
            with self.algebra.working():
                self._make_places()
                self._make_tensor(progress)
        self._tell(start)

    def with_operator(self, operator):
        """The same with a tensor of another operator; pairs are shared, and what both hold counts against one cap."""
        start, other = time.perf_counter(), copy(self)
        other.three = self.three.with_operator(operator)
        with self.engine.lock, self.algebra.working():
            other._make_tensor(None)
        other._tell(start)
        return other

    def _make_tensor(self, progress):
        """Factorises the metric, chooses a store, and makes the table if there is one."""
        self.three.compile_ahead(progress)
        self.metric = Metric(self.sorted_metric(), self.algebra, self.engine.operator.kind)
        self.columns = Columns(self.three, self.metric, self.algebra)
        self._make_table(self._fitting_store(self.asked))

    def _fitting_store(self, asked):
        """`chosen_store` for the rows of `metric`."""
        rows = ROWS_BY_ITSELF if self.asked == "auto" else 1
        row = row_bytes(self.algebra, self.nao, 2 * table_width(self.three.ncol), 2 * self.nao)
        work = max(self.columns.least_bytes, rows * row)
        return chosen_store(asked, self.algebra, (self.metric.size, self.three.ncol), work)

    def _make_table(self, store):
        """Makes the table of a store, if there is one."""
        self.store = store
        self.table = None if store == "direct" else Table(self.columns, store)
        if self.table is not None:
            self.three.store.clear()  # H matrices, which nothing needs any more
        self.engine.backend.mark()()

    def _tell(self, start):
        """Tells the log what was made since `start`."""
        three = self.three
        log.debug(
            "density fitting: %d auxiliary functions, %d columns for %d AOs, metric by %s, tensor of %s %s, %.2f s",
            three.naux, three.ncol, self.nao, self.metric.how, size_text(8 * self.size * three.ncol),
            WHERE[self.store], time.perf_counter() - start,
        )  # fmt: skip

    @property
    def engine(self):
        return self.three.engine

    @property
    def size(self):
        return self.metric.size

    @property
    def rows_are_made(self):
        """Whether `rows` makes all integrals."""
        return self.store == "direct"

    @contextmanager
    def working(self):
        """A context in which a thread works on the device."""
        with self.engine.lock, self.algebra.working():
            yield

    # set-up

    def sorted_metric(self):
        """(P|Q) in the order of the auxiliary basis; MemoryLimitError if its factorisation does not fit."""
        naux = self.three.naux
        what = f"the metric of {naux} auxiliary functions and its factors take"
        self.algebra.check_fits(metric_bytes(naux), what)
        places = self.algebra.send(np.argsort(self.three.auxiliary_order))
        xp = self.algebra.xp
        metric = xp.tril(self.algebra.wrapped(self.three.metric()))  # what is above is not written
        metric += xp.tril(metric, -1).T
        metric = metric[places]
        return xp.ascontiguousarray(metric[:, places])

    def _make_places(self):
        """The column of each pair (i, j), shape (nao, nao); the pair of each column, and its weight."""
        three, nao, xp = self.three, self.nao, self.algebra.xp
        self.columns_of = self.algebra.send(three.rows * nao + three.cols)
        turned = self.algebra.send(three.cols * nao + three.rows)
        places, numbers = xp.full(nao * nao, three.ncol), xp.arange(three.ncol)
        places[turned] = numbers
        places[self.columns_of] = numbers
        self.places = places.reshape(nao, nao)
        self.weights = self.algebra.send(three.weights)

    @cached_property
    def triangle(self):
        """The columns of a lower triangle, shape (nao (nao + 1) / 2,), on the device."""
        return self.places.reshape(-1)[self.algebra.send(np.flatnonzero(np.tri(self.nao, dtype=bool)))]

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
            dm, shape = checked_densities(dm, hermi, self.nao, finite=False)  # `_largest` looks
            orbitals = None if np.iscomplexobj(dm) else orbitals
            found = by_parts(dm, lambda part: self._real(part, with_j, with_k, orbitals))
        return tuple(None if v is None else v.reshape(shape) for v in found)

    def _real(self, dm, with_j, with_k, orbitals):
        """J and K of real matrices, shape (n, nao, nao), on the host."""
        self._check_densities(len(dm), with_j, with_k)
        densities = self.algebra.send(np.ascontiguousarray(dm))
        largest = self._largest(densities)
        request = self._request(densities, with_j, with_k)
        if with_k:
            orbitals = [None] * len(dm) if orbitals is None else orbitals
            request.exchange = [
                factors(one, self.algebra, of_it, size) for one, of_it, size in zip(densities, orbitals, largest)
            ]
        del densities
        return self._built(request, with_j, with_k)

    def _built(self, request, with_j, with_k):
        """J and K on the host. From a table K comes first, and is copied while the device makes J."""
        build = None if self.table is None else TableBuild(self.table, self.places, request)
        if build is None:
            DirectBuild(self.columns, request).run()
        else:
            build.make_exchange()
        self._complete(request)
        fetch_k = self.algebra.later(request.k) if with_k else None
        if build is not None:
            build.make_coulomb()
        fetch_j = self._fetch_j(request) if with_j else None
        k = fetch_k and fetch_k()
        return fetch_j and fetch_j(), k

    def _largest(self, densities):
        """The largest element of each density; ArgumentError for one that has others than finite numbers."""
        found = self.algebra.fetch(abs(densities).max(axis=2).max(axis=1))  # by more threads than of one long axis
        if not np.isfinite(found).all():
            raise not_finite()
        return found

    def _request(self, densities, with_j, with_k):
        """A `Request` for densities, shape (n, nao, nao), on the device, as yet without the factors for K."""
        n, nao, ncol = len(densities), self.nao, self.three.ncol
        coulomb, symmetric = zeros(self.algebra, (n if with_j else 0, table_width(ncol))), None
        for row, density in zip(coulomb, densities):
            symmetric = 0.5 * (density + density.T)
            row[:ncol] = symmetric.reshape(-1)[self.columns_of] * self.weights
        j, k = (zeros(self.algebra, shape) for shape in (coulomb.shape, (n if with_k else 0, nao, nao)))
        return Request(coulomb, symmetric, [], j, k)

    def _complete(self, request):
        """Completes K that are symmetric."""
        for k, f in zip(request.k, request.exchange):
            if f.symmetric:
                complete_exchange(k)

    def _fetch_j(self, request):
        """A function that fetches J as matrices."""
        return self.algebra.later(request.j[:, self.places])

    def _check_densities(self, count, with_j, with_k):
        """MemoryLimitError if there is no memory for densities, J and K."""
        width = table_width(self.three.ncol)
        need = 8 * count * (3 * with_j * width + (2 + with_j + 3 * with_k) * self.nao**2)
        what = f"{count} density matrices of {self.nao} AOs, their J and K take"
        self.algebra.check_fits(need, what, "raise max_memory or give fewer at once")

    # rows of B

    @locked
    def rows(self, first, last):
        """Rows of B from first to last as PySCF has them: shape (last - first, nao (nao + 1) / 2), lower triangles."""
        out = np.zeros((last - first, self.nao * (self.nao + 1) // 2))
        with self.engine.lock, self.algebra.working():
            if self.table is None:
                self._direct_rows(self.columns, first, last, out)
                return out
            most = block_rows(self.algebra, 8 * (2 * table_width(self.three.ncol) + out.shape[1]))
            for start, rows in self.table.blocks(first, last, most):
                self.algebra.gather_to_host(rows, self.triangle, out[start - first : start - first + len(rows)])
        return out

    @locked
    def mo_rows(self, left, right):
        """Rows of B over pairs of orbitals, a NumPy array (size, n_i, n_a); of ndarrays (nao, n_i) and (nao, n_a).

        MemoryLimitError if there is no memory for it on the host, or for the least part of the work on the device.
        """
        out = host_array((self.size, left.shape[1], right.shape[1]), ROWS)
        self.transformed([(left, right)], rows_into(self.algebra, out))
        return out

    def transformed(self, pairs, take):
        """`transform` of all rows."""
        with self.working():
            transform(self, pairs, take)

    def transform_bytes(self, pairs):
        """Bytes on the device that `transformed` needs beside its results."""
        return least_bytes(self, pairs)

    def _direct_rows(self, columns, first, last, out):
        """Rows of B, from a pass through all integrals."""
        i, j = np.maximum(self.three.rows, self.three.cols), np.minimum(self.three.rows, self.three.cols)
        place = i * (i + 1) // 2 + j
        once = (self.three.weights == 2.0) | (self.three.rows >= self.three.cols)
        for start, stop, part in columns.solved():
            some = once[start:stop]
            out[:, place[start:stop][some]] = self.algebra.fetch(part[first:last])[:, some]
