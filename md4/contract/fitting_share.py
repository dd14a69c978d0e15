"""What one of several workers does in density fitting: J and K of rows of B that are its own.

    J = sum_k J_k ,   K = sum_k K_k ,        J_k and K_k from the rows Q = k, k + n, k + 2n, ... of worker k of n

Rows are dealt out in turn, since row Q of W = L^-1 ends at column Q: so all workers multiply the same. Each makes all
integrals (P|ij), multiplies them by its rows of W (`md4.contract.metric_rows`), and keeps its rows of B. Nothing goes
from one worker to another but W, densities, J and K.

Without a table (`md4.contract.direct_fitting`) the workers divide columns for J, and the orbitals of each density for
K, so that no half-transformed integrals need to be added up.
"""

from contextlib import suppress
from copy import copy

import numpy as np

from md4.contract.density_fitting import DensityFitting
from md4.contract.direct_fitting import DirectBuild
from md4.contract.exchange_factors import Factors, factors
from md4.contract.fitting_orbitals import transform
from md4.contract.fitting_stores import Columns, table_bytes
from md4.contract.metric_rows import inverse
from md4.contract.three_centre import ThreeCentre
from md4.errors import MemoryLimitError
from md4.support.display import size_text
from md4.support.locks import Lock
from md4.support.memory import host_memory


def own_rows(first, last, number, count):
    """(first, last) of the own rows of worker `number` of `count` that are among the rows first to last of B."""
    return tuple(-(-max(0, row - number) // count) for row in (first, last))


class Share(DensityFitting):
    """The part of one worker. Its methods are called one after the other by `md4.contract.fitting_team`.

    Parameters
    ----------
    bases : (Basis, Basis)
    options : dict
        Other arguments of `ThreeCentre`.
    store : str
        As for `DensityFitting`.
    number, count : int
        Of this worker, and of all.

    Attributes
    ----------
    metric : md4.contract.metric_rows.Rows
        The own rows of W; all of them for a build without a table.
    size : int
        Number of the own rows of B.
    """

    def __init__(self, bases, options, store, number, count):
        self.bases, self.options, self.asked = bases, options, store
        self.lock, self.nao, self.number, self.count = Lock(), bases[0].nao, number, count
        self.three = None

    # set-up

    def begin(self, pairs=None):
        """Finds the shell pairs that are kept, or takes those of another share; returns them."""
        if self.three is None:
            self.three = ThreeCentre(*self.bases, **self.options, pairs=pairs)
            with self.engine.lock:
                self.algebra = self.engine.backend.algebra()
                with self.algebra.working():
                    self._make_places()
        return self.three.pairs

    def with_operator(self, operator):
        """The same, without a tensor, for another operator."""
        other = copy(self)
        other.three = self.three.with_operator(operator)
        return other

    def compile_ahead(self):
        """Compiles what is missing."""
        with self.engine.lock:
            self.three.compile_ahead()

    def make_inverse(self):
        """The `Inverse` of the whole metric."""
        with self.working():
            return inverse(self.sorted_metric(), self.algebra, self.engine.operator.kind)

    def stores(self, whole, beside):
        """What `store` may be with the memory of this worker; tables of `beside` workers share that of the host."""
        with self.working():
            self.lists = self.three.prepared  # now, since what is left after it is looked at
            if self.asked == "direct":
                return {"direct"}
            self._take_rows(whole, slice(self.number, None, self.count))
            if self.asked != "auto":
                return {self._store_beside(self.asked, beside)}
            found = {"direct"}
            for store in ("device", "host") if self.algebra.has_host_memory else ("device",):
                with suppress(MemoryLimitError):
                    found.add(self._store_beside(store, beside))
            return found

    def _store_beside(self, asked, beside):
        """`_fitting_store`; MemoryLimitError also where the host has no memory for the tables of all."""
        need, left = beside * table_bytes(self.size, self.three.ncol), host_memory()
        if asked == "host" and need > left:
            raise MemoryLimitError(
                f"the parts of the three-centre tensor of {beside} workers take {size_text(need)}, but the host has "
                f"{size_text(left)}; use store='device' or store='direct'."
            )
        return self._fitting_store(asked)

    def _take_rows(self, whole, piece):
        """Keeps rows of an `Inverse`."""
        self.metric = whole.rows(piece, self.algebra)
        self.columns = Columns(self.three, self.metric, self.algebra)

    def keep(self, whole, store):
        """Makes the table of the store that all workers take. Without one, all rows of W are needed."""
        with self.working():
            if store == "direct":
                self.metric = self.columns = None  # frees their memory first
                self._take_rows(whole, slice(None))
            self._make_table(store)
            self.engine.backend.mark()()

    # builds

    def partial(self, dm, with_j, with_k, orbitals):
        """J and K of the own rows of B, on the host."""
        with self.working():
            return self._real(dm, with_j, with_k, orbitals)

    def all_factors(self, dm, orbitals):
        """The `Factors` of density matrices, on the host."""
        fetch, found = self.algebra.fetch, []
        with self.working():
            for matrix, of_matrix in zip(dm, [None] * len(dm) if orbitals is None else orbitals):
                largest = float(abs(matrix).max())
                f = factors(self.algebra.send(np.ascontiguousarray(matrix)), self.algebra, of_matrix, largest)
                sides = [fetch(self.algebra.xp.ascontiguousarray(side.T)).T for side in f.sides]
                found.append(Factors(sides[0], sides[-1], f.negative))
        return found

    def own_factors(self, f):
        """What of `Factors` on the host is for this worker."""
        own = slice(self.number, None, self.count)
        sides = [self.algebra.send(np.ascontiguousarray(side.T[own])).T for side in f.sides]
        return Factors(sides[0], sides[-1], len(range(f.negative)[own]))

    def own_columns(self):
        """(first, last) of the columns of which this worker makes J without a table; both are edges."""
        edges, total = self.three.edges, self.three.ncol
        ends = [np.searchsorted(edges, total * n // self.count) for n in (self.number, self.number + 1)]
        return tuple(int(edges[end]) for end in ends)

    def first_passes(self, dm, with_j, with_k, exchange):
        """(a build without a table, its rho_P on the host), after K is made."""
        with self.working():
            self._check_densities(len(dm), with_j, with_k)
            request = self._request(self.algebra.send(np.ascontiguousarray(dm)), with_j, with_k)
            request.exchange = [self.own_factors(f) for f in exchange] if with_k else []
            build = DirectBuild(self.columns, request, self.own_columns())
            rho = build.first_passes()
            self._complete(request)
            return build, self.algebra.fetch(rho)

    def second_pass(self, build, rho, with_j, with_k):
        """J and K of this worker on the host, with the rho_P of all workers."""
        with self.working():
            build.second_pass(self.algebra.send(rho.copy()))  # which it overwrites
            fetch_j = self._fetch_j(build.request) if with_j else None
            return fetch_j and fetch_j(), self.algebra.fetch(build.request.k) if with_k else None

    def transform_all(self, whole, pairs, take):
        """`transform` of all rows of B, from integrals."""
        with self.working():
            columns = Columns(self.three, whole.rows(slice(None), self.algebra), self.algebra)
            transform(self, pairs, take, columns)

    def made_rows(self, whole, first, last):
        """Any rows of B as from `rows`, from a pass through all integrals."""
        out = np.zeros((last - first, self.nao * (self.nao + 1) // 2))
        if last <= first:
            return out
        with self.working():
            columns = Columns(self.three, whole.rows(slice(first, last), self.algebra), self.algebra)
            self._direct_rows(columns, 0, last - first, out)
        return out
