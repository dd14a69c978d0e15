"""Density fitting by several devices of this process, or of several processes: who has which part of it.

`md4.contract.fitting_share` says how the work is divided. All workers take the shell pairs and W of the first one,
with the same bits: they would else not have parts of the same tensor, since eigenvectors, or the choice between them
and Cholesky, may differ between devices.
"""

import time
from copy import copy

import numpy as np

from md4.contract.densities import by_parts, checked_densities
from md4.contract.density_fitting import CUTOFF, WHERE, DensityFitting
from md4.contract.fitting_orbitals import LEAST_ROWS, ROWS, rows_into
from md4.contract.fitting_share import Share, own_rows
from md4.contract.fitting_stores import STORES, block_rows
from md4.contract.fock import common_facts
from md4.contract.ranks import Alone, collective
from md4.contract.team import shared_devices
from md4.engine import BACKENDS
from md4.method.operators import as_operator
from md4.support.arguments import checked_choice
from md4.support.display import size_text
from md4.support.locks import Lock, locked
from md4.support.log import log
from md4.support.memory import host_array
from md4.support.threads import Standing, run_each


def density_fitting(
    basis, auxiliary, operator=None, backend="auto", stream=None, max_memory=None, devices=None, store="auto",
    cutoff=CUTOFF, ranks=None,
):  # fmt: skip
    """A `DensityFitting` on one device of this process alone, else a `FittingTeam`; the arguments are those of both."""
    ranks = Alone() if ranks is None else ranks
    options = {"backend": backend, "stream": stream, "max_memory": max_memory}

    def check():
        checked_choice("backend", backend, BACKENDS)
        checked_choice("store", store, STORES)
        return shared_devices(**options, devices=devices, ranks=ranks)

    numbers, options["max_memory"] = ranks.together(check)
    if ranks.size == 1 and len(numbers) == 1:
        return DensityFitting(basis, auxiliary, operator, device=numbers[0], store=store, cutoff=cutoff, **options)
    return FittingTeam(basis, auxiliary, operator, numbers, ranks, store, cutoff, options)


def of_first(name):
    """The property of a `FittingTeam` that is one of its first worker."""
    return property(lambda team: getattr(team.shares[0], name))


class FittingTeam:
    """J and K by density fitting on several devices; with several processes, most methods are collective.

    Parameters
    ----------
    basis, auxiliary : Basis
    operator : Operator or None
    numbers : list of int or None
        Devices of this process, as from `shared_devices`.
    ranks : md4.contract.ranks.Ranks or md4.contract.ranks.Alone
        The processes that build together.
    store, cutoff
        As for `DensityFitting`. What is chosen is the same for all workers.
    options : dict
        backend, stream and max_memory of each worker.

    Attributes
    ----------
    shares : list of Share
        The workers of this process.
    count : int
        Number of the workers of all processes.
    inverse : md4.contract.metric_rows.Inverse
        W on the host, of which workers have rows.
    store : str
        What was chosen.

    Raises
    ------
    ArgumentError, BasisError, DeviceError, MemoryLimitError
        As `DensityFitting`, or ranks that do not do the same.
    RankError
        Another rank failed. Its message is that rank's.
    """

    def __init__(self, basis, auxiliary, operator, numbers, ranks, store, cutoff, options):
        start = time.perf_counter()
        self.lock, self.ranks, self.threads = Lock(), ranks, Standing()
        operator = as_operator("coulomb" if operator is None else operator)
        ranks.same({
            **common_facts(basis), "the auxiliary basis": common_facts(auxiliary)["the molecule or its basis"],
            "the operator": operator, "store": store, "cutoff": cutoff,
        })  # fmt: skip
        counts = ranks.gather(len(numbers))
        first, self.count = sum(counts[: ranks.rank]), sum(counts)
        self.shares = [
            Share((basis, auxiliary), {"operator": operator, "device": device, "cutoff": cutoff} | options, store,
                  first + n, self.count)
            for n, device in enumerate(numbers)
        ]  # fmt: skip
        pairs = ranks.first(self.shares[0].begin)
        ranks.together(lambda: self._each(lambda share: share.begin(pairs)))
        self._make_tensor(start)

    @locked
    def with_operator(self, operator):
        """The same with a tensor of another operator; pairs are shared, and what both hold counts against one cap."""
        start, other = time.perf_counter(), copy(self)
        other.shares = [share.with_operator(operator) for share in self.shares]
        other._make_tensor(start)
        return other

    def _make_tensor(self, start):
        """Makes the parts of the tensor, on the best store for which all workers have the memory."""
        ranks = self.ranks
        ranks.same({"the operator": self.engine.operator})

        def compile_all():
            for share in self.shares:
                share.compile_ahead()

        ranks.together(lambda: ranks.once_a_node(compile_all))
        self.inverse = ranks.first(self.shares[0].make_inverse)
        beside = len(self.shares) * ranks.node_size
        possible = ranks.together(lambda: self._each(lambda share: share.stores(self.inverse, beside)))
        possible = [stores for of_rank in ranks.gather(possible) for stores in of_rank]
        self.store = next(store for store in STORES[1:] if all(store in stores for stores in possible))
        ranks.together(lambda: self._each(lambda share: share.keep(self.inverse, self.store)))
        log.debug(
            "density fitting by %d workers: %d auxiliary functions, %d columns for %d AOs, metric by %s, tensor of %s "
            "%s, %.2f s", self.count, self.three.naux, self.three.ncol, self.nao, self.inverse.how,
            size_text(8 * self.size * self.three.ncol), WHERE[self.store], time.perf_counter() - start,
        )  # fmt: skip

    def _each(self, work):
        """[work(share) for the workers of this process], at the same time, each in a thread that is always the same."""
        return run_each(len(self.shares), lambda n: work(self.shares[n]), start=self.threads.start)

    # what a `DensityFitting` has

    three, engine, algebra, metric, nao = map(of_first, ("three", "engine", "algebra", "metric", "nao"))

    @property
    def size(self):
        """Number of rows of B, of all workers."""
        return self.inverse.size

    @property
    def rows_are_made(self):
        """Whether `rows` makes all integrals: so that it need not be collective, ranks do not send each other rows."""
        return self.store == "direct" or self.ranks.size > 1

    @locked
    @collective
    def get_jk(self, dm, hermi=1, with_j=True, with_k=True, orbitals=None):
        """As `DensityFitting.get_jk`. Densities are those of rank 0, and all ranks get the same bits."""
        dm, shape = self.ranks.together(lambda: checked_densities(dm, hermi, self.nao))
        self.ranks.same({
            "the operator": self.engine.operator, "the shape of the densities": shape,
            "the type of the densities": dm.dtype, "with_j": bool(with_j), "with_k": bool(with_k),
        })  # fmt: skip
        dm = self.ranks.broadcast(dm)
        orbitals = None if np.iscomplexobj(dm) else orbitals
        found = by_parts(dm, lambda part: self._real(part, with_j, with_k, orbitals))
        return tuple(None if v is None else v.reshape(shape) for v in found)

    def _real(self, dm, with_j, with_k, orbitals):
        """J and K of real matrices, shape (n, nao, nao)."""
        if self.store != "direct":
            return self.summed(lambda share: share.partial(dm, with_j, with_k, orbitals))
        # All workers must have parts of the same factors.
        exchange = self.ranks.first(lambda: self.shares[0].all_factors(dm, orbitals)) if with_k else None
        begun = self._all(lambda share: share.first_passes(dm, with_j, with_k, exchange))
        builds = dict(zip(self.shares, (build for build, _ in begun)))
        (rho,) = self._sum([(rho,) for _, rho in begun])
        return self.summed(lambda share: share.second_pass(builds[share], rho, with_j, with_k))

    def _all(self, work):
        """`_each`; if it fails on one rank, it fails on all."""
        return self.ranks.together(lambda: self._each(work))

    def _sum(self, parts):
        """The sum of tuples of arrays of all workers; None stays None."""
        total, *others = parts
        made = [n for n, array in enumerate(total) if array is not None]
        for other in others:
            for n in made:
                np.add(total[n], other[n], out=total[n])
        self.ranks.sum([total[n] for n in made])
        return total

    def summed(self, work):
        """The sums of what work(share) returns for all workers, lists of arrays on the host, or None."""
        return self._sum(self._all(work))

    @locked
    def rows(self, first, last):
        """As `DensityFitting.rows`. It is not collective: a rank makes the rows of others anew, with all integrals."""
        if self.rows_are_made:
            return self.shares[0].made_rows(self.inverse, first, last)
        out = np.zeros((last - first, self.nao * (self.nao + 1) // 2))

        def collect(share):
            start, stop = own_rows(first, last, share.number, share.count)
            if stop > start:
                out[share.number + share.count * start - first :: share.count] = share.rows(start, stop)

        self._each(collect)
        return out

    # pairs of orbitals: what is made of all rows is made on the device of the first worker

    def working(self):
        """As `DensityFitting.working`, on the device of the first worker."""
        return self.shares[0].working()

    @locked
    def mo_rows(self, left, right):
        """As `DensityFitting.mo_rows`; of the rows of each worker on its device, or as `rows` from integrals."""
        out, pairs = host_array((self.size, left.shape[1], right.shape[1]), ROWS), [(left, right)]

        def own(share):
            share.transformed(pairs, rows_into(share.algebra, out[share.number :: share.count]))

        if self.rows_are_made:
            self.shares[0].transform_all(self.inverse, pairs, rows_into(self.algebra, out))
        else:
            self._each(own)
        return out

    def transformed(self, pairs, take):
        """As `DensityFitting.transformed`; of the rows of several workers by way of the host."""
        if self.rows_are_made:
            self.shares[0].transform_all(self.inverse, pairs, take)
            return
        for number, (left, right) in enumerate(pairs):
            rows = self.mo_rows(left, right)
            with self.working():
                most = block_rows(self.algebra, 2 * rows[0].nbytes)
                for first in range(0, len(rows) if rows.size else 0, most):
                    some = rows[first : first + most]
                    block = self.algebra.send(np.ascontiguousarray(some.transpose(1, 0, 2)))
                    take(number, slice(first, first + len(some)), slice(None), slice(None), block)

    def transform_bytes(self, pairs):
        """As `DensityFitting.transform_bytes`."""
        blocks = [2 * 8 * LEAST_ROWS * left.shape[1] * right.shape[1] for left, right in pairs]
        return max([share.transform_bytes(pairs) for share in self.shares] + blocks)
