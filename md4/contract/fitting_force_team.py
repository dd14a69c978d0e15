"""Gradients of density fitting by several devices of this process, or of several processes.

Each worker makes rho and (oo'|Q) of its own rows of B, or without a table of its own columns and orbitals o; the host
adds these up. c, C and Gamma2 are made of them by the first worker of each process. Then each worker makes Gamma3 of
its own auxiliary shells, and the forces of these and of its own rows of Gamma2. All are added up in a fixed order.
"""

from md4.contract.exchange_factors import Factors
from md4.contract.fitting_gradient import FittingGradient, orbitals_of
from md4.contract.fitting_stores import zeros
from md4.contract.fitting_team import FittingTeam, density_fitting
from md4.contract.gradient import energy_terms
from md4.contract.ranks import collective
from md4.support.locks import locked
from md4.support.memory import host_array


def gradient_of(fitting, ranks, cutoff):
    """What makes the gradient of a `DensityFitting` or of a `FittingTeam`; collective.

    Where a GPU makes no forces, that is a fitting on the CPU without a table, with the same `cutoff`.
    """
    if not fitting.engine.backend.sums.makes_forces:
        bases, operator = fitting.three.basis.parts, fitting.engine.operator
        fitting = density_fitting(*bases, operator, "cpu", store="direct", cutoff=cutoff, ranks=ranks)
    return (TeamGradient if isinstance(fitting, FittingTeam) else FittingGradient)(fitting)


class TeamGradient:
    """The gradients of a `FittingTeam`; all ranks call it and get the same.

    Parameters
    ----------
    fitting : FittingTeam

    Raises
    ------
    UnsupportedError
        As `FittingGradient`.
    """

    def __init__(self, fitting):
        self.fitting, self.lock, self.ranks = fitting, fitting.lock, fitting.ranks
        self.workers = {share: OneOfTeam(share, fitting) for share in fitting.shares[1:]}
        self.first = self.workers[fitting.shares[0]] = FirstOfTeam(fitting, self.workers)

    @locked
    @collective
    def run(self, dm, coulomb, exchange, orbitals=None, response=True, tolerance=0.0):
        """As `FittingGradient.run`; densities and factors of J and K are the same on all ranks."""
        first, team = self.first, self.fitting
        terms = energy_terms(dm, coulomb, exchange, team.nao)
        self.ranks.same({
            "the operator": team.engine.operator, "the number of densities": len(terms.densities),
            "coulomb": terms.coulomb.tolist(), "exchange": terms.exchange.tolist(), "auxbasis_response": bool(response),
            "tolerance": float(tolerance),
        })  # fmt: skip
        if not first.three.ncol:
            return first.nothing()
        self.ranks.once_a_node(lambda: [this.compile_ahead(response) for this in self.workers.values()])
        with team.working():
            fitted, two = first.fetched(terms, orbitals_of(terms, orbitals), response)
        return tuple(team.summed(lambda share: self.workers[share].own_forces(fitted, two, tolerance)))


def moved(fitted, move):
    """A `Fitted` whose arrays a function has copied."""
    arrays = {name: getattr(fitted, name) for name in ("density", "c", "orbital")}
    arrays = {name: move(array) for name, array in arrays.items() if array is not None}
    return fitted._replace(factors=moved_factors(fitted.factors, move), **arrays)


def moved_factors(factors, move):
    """The same of `Factors` of a symmetric matrix, or None."""
    if factors is None:
        return None
    left = move(factors.left.T).T  # whose columns are contiguous
    return Factors(left, left, factors.negative)


class OneOfTeam(FittingGradient):
    """What one worker does.

    Parameters
    ----------
    share : md4.contract.fitting_share.Share
    team : FittingTeam
    """

    def __init__(self, share, team):
        super().__init__(share)
        own, every = slice(share.number, None, share.count), slice(None)
        # Which rows of B, and which o of (oo'|Q), the worker has.
        self.team, (self.rows, self.own) = team, (every, own) if share.table is None else (own, every)

    def compile_ahead(self, response):
        """As that of `FittingGradient`."""
        with self.fitting.working():
            super().compile_ahead(response)

    def own_sums(self, densities):
        """[rho_Q] of the rows of B that the worker has, or of its columns, on the host among zeros."""
        with self.fitting.working():
            ranges = [self.fitting.own_columns()] if self.fitting.table is None else []
            return [self.placed(super().coulomb_sums(self.algebra.send(densities), None, *ranges))]

    def own_pairs(self, sides):
        """[(oo'|Q), ...] of the rows of B, or of the o, that the worker has, in the same way."""
        with self.fitting.working():
            counts = self.numbers_of_pairs([0 if left is None else left.shape[1] for left in sides], copies=1)
            made = [zeros(self.algebra, (self.fitting.size, count)) for count in counts]
            super().add_orbital_pairs(sides, made, None, self.own)
            return [*map(self.placed, made)]

    def placed(self, array):
        """The rows of an array of the device on the host, zeros for those of the other workers."""
        out = host_array((self.team.size, array.shape[1]), "integrals over pairs of orbitals of a worker")
        out[...] = 0.0
        out[self.rows] = self.algebra.fetch(array)
        return out

    def own_forces(self, fitted, two, tolerance):
        """`forces` of the worker, of what is on the host."""
        send, share = self.algebra.send, self.fitting
        with share.working():
            here, two = [moved(this, send) for this in fitted], None if two is None else send(two)
            return self.forces(here, two, tolerance, share.number, share.count)


class FirstOfTeam(OneOfTeam):
    """The first worker of a process: c, C and Gamma2, of the rows of all workers. Its methods are collective.

    Parameters
    ----------
    team : FittingTeam
    workers : dict
        `OneOfTeam` of all shares of the process.
    """

    def __init__(self, team, workers):
        super().__init__(team.shares[0], team)
        self.workers, self.size = workers, team.size

    def fetched(self, terms, orbitals, response):
        """As `fitted`, on the host."""
        share, fetch = self.fitting, self.algebra.fetch
        self.metric = share.metric if share.table is None else self.team.inverse.rows(slice(None), self.algebra)
        try:
            found, two = self.fitted(terms, orbitals, response)
        finally:
            self.metric = None  # which frees its memory
        return [moved(this, fetch) for this in found], None if two is None else fetch(two)

    def factors(self, terms, densities, orbitals):
        """Those that the first worker of all has made, so that all have the same."""

        def make():
            found = super(FirstOfTeam, self).factors(terms, densities, orbitals)
            return [moved_factors(f, self.algebra.fetch) for f in found]

        return [moved_factors(f, self.algebra.send) for f in self.team.ranks.first(make)]

    def coulomb_sums(self, densities, columns):
        """Of all rows of B, what the workers have made."""
        if columns is not None:
            return super().coulomb_sums(densities, columns)
        given = self.algebra.fetch(densities)
        (rho,) = self.team.summed(lambda share: self.workers[share].own_sums(given))
        return self.algebra.send(rho)

    def add_orbital_pairs(self, sides, out, columns):
        """The same of pairs of orbitals."""
        if columns is not None:
            super().add_orbital_pairs(sides, out, columns)
            return
        for array, found in zip(out, self.team.summed(lambda share: self.workers[share].own_pairs(sides))):
            array[...] = self.algebra.send(found)
