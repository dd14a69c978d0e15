"""Gradients of energies that are sums of products of density matrices with integrals.

Everything becomes a sum of squares, E = 1/2 sum_s [ j_s D_ab D_cd - k_s D_ac D_bd ] (ab|cd), whose D are symmetric, or
antisymmetric with j_s = 0. For any matrices L and R, with symmetric parts S and antisymmetric parts A,

    L_ab R_cd (ab|cd) = S^L_ab S^R_cd (ab|cd)          L_ac R_bd (ab|cd) = (S^L_ac S^R_bd + A^L_ac A^R_bd) (ab|cd)

summed over all functions, by the permutations of (ab|cd), and X Y = ((X + Y)/2)^2 - ((X - Y)/2)^2 for two matrices.
"""

import time
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from md4.contract.densities import LAYOUT, checked_densities
from md4.contract.ranks import collective
from md4.contract.screening import PRIMITIVE_SHARE, Statistics
from md4.contract.team import Team
from md4.contract.unlisted import unlisted, unlisted_bound
from md4.cpu.matrices import symmetric_parts
from md4.cpu.screening import raise_norms
from md4.engine import Engine
from md4.errors import ArgumentError
from md4.method.mirror import ao_parities, mixes_parities
from md4.method.operators import Mixture, Operator, as_operator, check_order
from md4.support.arguments import as_list, checked_real, shown
from md4.support.locks import locked
from md4.support.types import Densities, HostArray, JKPair

# Relative to the largest element of a density: a larger difference to its transpose is no rounding error.
ASYMMETRY = 1e-8
# A gradient leaves out quartets by a tolerance so much larger than that of J and K, as its bounds go with D^2.
FACTOR = 10.0
# Where lists lack too much for derivatives of J and K, their tolerance is divided by what they lack and multiplied by
# this, one after the other: bounds of what is in no list can be far too large. At last all pairs are listed.
FINER = 1.0, 1e-3, 1e-6, 0.0
# Densities of `Terms` that are there at once, by their number: as given and in the order of md4, and what makes them.
COPIES = 3
# Of a basis with shells of at least so many contracted functions, as atomic natural orbitals have, the CPU takes the
# primitives: its work for a primitive quartet grows with the contracted functions of a side. With fewer it takes as
# long either way.
MANY_FUNCTIONS = 4


class Terms(NamedTuple):
    """Densities, shape (n, nao, nao), and the factors j and k of each, shape (n,)."""

    densities: np.ndarray
    coulomb: np.ndarray
    exchange: np.ndarray


def energy_terms(dm, coulomb, exchange, nao):
    """The `Terms` of the energy of one density, or of those of both spins.

    Raises
    ------
    ArgumentError
        Densities of other shapes, that are not symmetric or not real, or factors that are no finite numbers.
    """
    densities, shape = checked_densities(dm, 1, nao)
    coulomb, exchange = checked_real("coulomb", coulomb), checked_real("exchange", exchange)
    if len(shape) == 3 and shape[0] != 2:
        raise ArgumentError(
            f"the gradient takes one density matrix, shape ({nao}, {nao}), or those of alpha and beta, shape "
            f"(2, {nao}, {nao}), not {shape[0]}; see product_gradient for others."
        )
    check_real(densities)
    densities, largest, difference = symmetric_parts(densities)
    if difference > ASYMMETRY * largest:
        raise ArgumentError("the gradient takes symmetric density matrices; see product_gradient for others.")
    if len(shape) == 2:
        return in_use(densities, [coulomb], [exchange / 2])
    both = np.concatenate([densities.sum(axis=0)[None], densities])
    return in_use(both, [coulomb, 0.0, 0.0], [0.0, exchange, exchange])


def product_terms(left, right, coulomb, exchange, nao, check=lambda count: None):
    """The `Terms` of 1/2 sum_n [ j_n L_ab R_cd - k_n L_ac R_bd ] (ab|cd); errors as in `energy_terms`.

    `check` is called with their largest number before they are made.
    """
    left, shape = checked_densities(left, 0, nao)
    right, other = (left, shape) if right is None else checked_densities(right, 0, nao)
    if shape != other:
        raise ArgumentError(f"left and right must have the same shape, not {shape} and {other}.")
    check_real(left)
    check_real(right)
    of_pairs = (checked_factors(*given, len(left)) for given in (("coulomb", coulomb), ("exchange", exchange)))
    check(4 * len(left))
    densities, of_j, of_k = np.empty((4 * len(left), nao, nao)), [], []
    places = iter(densities)
    for one, two, j, k in zip(left, right, *of_pairs):
        for sign in (1, -1):
            x, y = ((this + sign * this.T) / 2 for this in (one, two))
            for combine in (np.add, np.subtract):
                made = combine(x, y, out=next(places))
                made /= 2
            of_j += [j, -j] if sign == 1 else [0.0, 0.0]
            of_k += [k, -k]
    return in_use(densities, of_j, of_k)


def checked_factors(name, given, count):
    """`count` finite numbers, from as many or from one."""
    values = np.atleast_1d(np.asarray(given, dtype=object))
    if values.shape not in ((1,), (count,)):
        raise ArgumentError(f"{name} must be a number or {count} numbers, one for each product.")
    return np.broadcast_to(np.array([checked_real(name, value) for value in values]), count)


def check_real(densities):
    """ArgumentError for complex densities."""
    if np.iscomplexobj(densities):
        raise ArgumentError("gradients take real density matrices; those of complex ones are not available.")


def in_use(densities, coulomb, exchange):
    """`Terms` without those that are zero."""
    coulomb, exchange = np.array(coulomb, dtype=float), np.array(exchange, dtype=float)
    # of a density that is not zero hardly more than one row is looked at
    used = ((coulomb != 0) | (exchange != 0)) & np.array([any(map(np.any, this)) for this in densities], dtype=bool)
    chosen = densities if used.all() else densities[used]
    return Terms(np.ascontiguousarray(chosen), coulomb[used], exchange[used])


def separated(terms, operator, alpha, long_range, mixes):
    """[(Terms, operator), ...] of J and of exchange with `alpha` times an operator and `long_range` = (omega, beta).

    With 1/r, and a backend that `mixes` it with erf(omega r)/r, it is one pass for exchange, and one for J alone, which
    takes a fraction of its time.
    """
    densities, of_j, of_k = terms
    omega, beta = long_range
    largest, none = max(abs(alpha), abs(alpha + beta)), np.zeros_like(of_j)
    first, factor, other = 0.0, largest, Mixture(omega, alpha, beta)
    if operator.kind != "coulomb" or alpha == 0 or not mixes:
        first, factor, other = alpha, beta, Operator.erf(omega)
        if operator.kind == "coulomb" and alpha + beta == 0:
            first, factor, other = 0.0, alpha, Operator.erfc(omega)
    elif largest:  # bounds of 1/r are those of this mixture
        other = Mixture(omega, alpha / largest, beta / largest)
    return [(in_use(densities, of_j, first * of_k), operator), (in_use(densities, none, factor * of_k), other)]


def checked_long_range(long_range):
    """(omega, factor) as floats, or None where it adds nothing; ArgumentError for anything else than two such numbers.
    """
    if long_range is None:
        return None
    given = as_list(long_range)
    if given is None or len(given) != 2:
        raise ArgumentError(f"long_range must be a pair (omega, factor), not {shown(long_range)}.")
    omega, factor = checked_real("omega of long_range", given[0], 0), checked_real("the factor of long_range", given[1])
    return (Operator.erf(omega).parameter, factor) if omega else None


def norms_of(basis, densities):
    """|D_ab| of the blocks of each density, shape (n, nshell, nshell)."""
    return raise_norms(np.zeros((len(densities), basis.nshell, basis.nshell)), densities, basis)


def rehearse_forces(backend, basis, finest, terms, tolerance):
    """Asks a backend that launches nothing for the kernels of gradients.

    Parameters
    ----------
    backend : md4.gpu.backend.GpuBackend
        For the operator.
    basis : md4.Basis
    finest : float
        The tolerance of the lists of pairs.
    terms : tuple
        Fields of `Terms`.
    tolerance : float
    """
    _, made = rehearsed_lists(backend, basis, finest)
    made.run(backend, terms[0], norms_of(basis, terms[0]), *terms[1:], tolerance)


def rehearse_matrices(backend, basis, finest, densities, with_j, with_k):
    """The same for J and K of derivatives; `densities`, shape (n, nao, nao)."""
    engine, forces = rehearsed_lists(backend, basis, finest)
    made = engine.backend.sums.derivatives(engine, forces, PRIMITIVE_SHARE * finest)
    made.run(densities, with_j, with_k, 0.0)


def rehearsed_lists(backend, basis, finest):
    """An engine of a backend that launches nothing, and what makes the derivatives of the lists for a tolerance."""
    team = Team.of(Engine(basis, backend=backend.with_operator(as_operator("coulomb"))))
    team.make_lists(finest)
    team.make_forces(finest)
    return team.engine.with_operator(backend.operator), team.workers[0].forces


class Gradients:
    """What `md4.JK` has of derivatives by the positions of the nuclei."""

    mol: Any
    _ends: npt.NDArray[np.int64]  # where the AOs of each atom end, or of each shell of a `Basis`
    team: Any
    _unlisted: npt.NDArray[np.float64]  # bounds of what is in no list
    _primitives: Any  # what `_on_primitives` has made
    _kept: Any  # memory for the next build
    basis: Any
    stats: Statistics
    ranks: Any
    lock: Any

    @locked
    @collective
    def gradient(
        self, dm: Densities, coulomb: float = 1.0, exchange: float = 1.0, omega: float | None = None,
        tolerance: float | None = None, long_range: tuple[float, float] | None = None,
    ) -> HostArray:  # fmt: skip
        """The gradient of the two-electron energy by the positions of the nuclei, to which the AOs belong.

        The energy is ``coulomb``/2 D.J[D] - ``exchange``/4 D.K[D] of the density D of a closed shell, and
        ``coulomb``/2 D.J[D] - ``exchange``/2 (Da.K[Da] + Db.K[Db]), D = Da + Db, of those of two spins. Densities stay
        as they are, so the gradient of a whole energy has other terms besides (`md4.attach` gives that of PySCF's).
        No derivative of an integral is formed; see the page "Theory". Several devices and ranks each make a part.

        Parameters
        ----------
        dm : array_like, shape (nao, nao) or (2, nao, nao)
            Real and symmetric.
        coulomb, exchange : float
            Factors of both parts; 1 and 1 are those of Hartree-Fock.
        omega : float, optional
            Replaces the omega of the constructor, for both parts.
        tolerance : float, optional
            Shell quartets with a bound below this (Hartree/Bohr) are left out, of J and of exchange each where a GPU
            makes J apart, as of large molecules, and on a GPU primitive quartets of small classes, too; by default 10
            `direct_scf_tol`. `stats` has the sum of these bounds as `error_bound`, with those of shell pairs and
            primitive pairs that are in no list, and the root of the sum of their squares as `error_estimate`. A GPU
            computes small quartets of J, where it is alone or made apart, in single precision where the error is
            smaller than this, too, and on tensor cores small quartets of some classes in TF32 where that is expected;
            with 0 none. On a CPU, if there are shells of four contracted functions or more, quartets of primitives
            count, which are many, so that `error_bound` is far above the error.
        long_range : tuple of float, optional
            (omega, factor): so many times the exchange of erf(omega r)/r, for range-separated functionals, is added;
            with an omega of 0, which PySCF has for all other functionals, nothing.

        Returns
        -------
        ndarray, shape (natm, 3), in Hartree/Bohr
            For a `Basis`, a row for each of its shells: by the position of that shell.

        Raises
        ------
        ArgumentError
            Densities or options that cannot be used.
        UnsupportedError
            Shells of which four have angular momenta that add up to more than 31.
        MemoryLimitError
            The least workspace exceeds `max_memory`.
        """

        def parts(operator):
            added = checked_long_range(long_range)
            terms = energy_terms(self._fetched(dm), coulomb, exchange if added is None else 1.0, self.basis.nao)
            if added is None:
                return [(terms, operator)]
            mixes = self.engine.backend.name == "cpu"
            return separated(terms, operator, checked_real("exchange", exchange), added, mixes)

        return self._gradient(parts, omega, tolerance)

    @locked
    @collective
    def product_gradient(
        self, left: Densities, right: Densities | None = None, coulomb: Any = 1.0, exchange: Any = 1.0,
        omega: float | None = None, tolerance: float | None = None,
    ) -> HostArray:  # fmt: skip
        """The gradient of 1/2 sum_n [ j_n L_ab R_cd - k_n L_ac R_bd ] (ab|cd), for any matrices L and R.

        Every two-particle density that is a sum of products has this form: of response, of states that are not
        Hartree-Fock's, of differences.

        Parameters
        ----------
        left, right : array_like, shape (nao, nao) or (n, nao, nao)
            L and R, real; R is L by default.
        coulomb, exchange : float or array_like, shape (n,)
            j and k.
        omega, tolerance
            As in `gradient`, with which results and errors agree.
        """

        def parts(operator):
            other = None if right is None else self._fetched(right)
            given = self._fetched(left), other, coulomb, exchange, self.basis.nao
            return [(product_terms(*given, self._check_densities), operator)]

        return self._gradient(parts, omega, tolerance)

    @locked
    @collective
    def derivative_jk(
        self, dm: Densities, hermi: int = 0, with_j: bool = True, with_k: bool = True, omega: float | None = None,
        tolerance: float | None = None,
    ) -> JKPair:  # fmt: skip
        """J and K whose first function is derived by the position of its electron, as `get_jk` of PySCF's gradients.

        ::

            vj[x]_ij = -sum_kl (nabla_x i j|kl) D_lk          vk[x]_il = -sum_jk (nabla_x i j|kl) D_jk

        For forces alone, `gradient` takes a fraction of the time.

        Parameters
        ----------
        dm : array_like, shape (nao, nao) or (n, nao, nao)
            Real, of any symmetry; `hermi` is for PySCF's sake.
        with_j, with_k, omega
            As in `get_jk`.
        tolerance : float, optional
            A shell quartet is left out only if each order of its indices adds less than this to each element; by
            default `direct_scf_tol`. A GPU computes small quartets of J in single precision where the error is smaller
            than this, too. On a CPU, if there are shells of four contracted functions or more, those of primitives
            count.

        Returns
        -------
        vj, vk : ndarray, shape (3, nao, nao) or (n, 3, nao, nao), in Hartree/Bohr; None if not requested

        Raises
        ------
        ArgumentError, UnsupportedError, MemoryLimitError
            As for `gradient`.
        """
        self._follow_molecule()
        check_order(4 * self.basis.lmax, derivative=1)
        if tolerance is not None:
            self.ranks.together(lambda: checked_real("tolerance", tolerance, 0))
        densities, shape, _, with_j, with_k, operator, limit = self._agreed(
            "derivative_jk", dm, hermi, with_j, with_k, omega, tolerance
        )
        self.ranks.together(lambda: check_real(densities))
        if not (with_j or with_k):
            return None, None
        jk, coefficients, _ = self._on_primitives() or (self, None, None)
        if coefficients is not None:
            densities = self._counted(coefficients @ densities @ coefficients.T)
        found = jk._derivatives_of(densities, with_j, with_k, operator, limit)
        if coefficients is not None:
            found = [coefficients.T @ this @ coefficients for this in found]
        shape = (*shape[:-2], 3, *shape[-2:])
        return tuple(this.reshape(shape) if wanted else None for this, wanted in zip(found, (with_j, with_k)))

    def _derivatives_of(self, densities, with_j, with_k, operator, limit):
        """J and K of derivatives, each (3 n, nao, nao), for agreed arguments."""
        densities = np.require(densities, np.float64, LAYOUT)
        given, frame = (with_j, with_k), self._frame
        if not self._has_pairs(limit):
            return [np.zeros((3 * len(densities), *densities.shape[1:])) for _ in "jk"]
        self._compile_ahead("matrices", operator, lambda *of: rehearse_matrices(*of, densities, *given), given)
        with self.engine.lock:
            turned, forces = self._in_frame(densities), self._forces_of_lists(limit)
            # a derivative along an axis is that along three turned ones, whose factors add up to sqrt(3) at most
            share = 1.0 if frame.rotation is None else frame.sharpening / sqrt(3)
            for step in FINER:
                missing = self._most_missing(forces, turned)
                if not missing > share * limit > 0:
                    break
                forces = self._forces_of_lists(self._finest * step * share * limit / (2 * missing))
            cutoff, limit = PRIMITIVE_SHARE * self._finest * frame.sharpening, share * limit
            apart = with_j and not forces.has_digits_of_matrices(norms_of(frame.basis, turned), limit)
            found = self.team.matrices(operator, turned, with_j and not apart, with_k, limit, cutoff, self.progress)
            self.ranks.sum(found)
            if frame.rotation is not None:
                found = [np.einsum("nxij,xy->nyij", this, frame.rotation) for this in found]
            found = [frame.sums(this.reshape(-1, *this.shape[-2:])) for this in found]
        if apart:  # by CPUs, since a GPU has no other way to make it
            make: Any = type(self)
            other = make(self.basis, None, "cpu", None, None, self.direct_scf_tol, self.progress, None, self._comm)
            found[0], _ = other._derivatives_of(densities, True, False, operator, limit)
        return found

    def _most_missing(self, forces, densities):
        """What of a pair no list has adds at most to an element of J or K of derivatives, with any other pair."""

        def most():
            (size, derived), norms = (part.max() for part in self._unlisted), norms_of(self._frame.basis, densities)
            own, largest = (max(getattr(of, name).max() for of in forces.bounds) for name in ("own", "largest"))
            factor = 2 * sqrt(np.diff(self._frame.basis.ao_loc).max()) * norms.max(initial=0.0)
            return float(factor * (derived * (own + size) + size * largest))

        return self.ranks.first(most)  # other devices may have other last digits

    def _has_pairs(self, tolerance):
        """Whether any shell pair is in a list."""
        self._refine(tolerance)
        self._make_lists()
        return any(map(len, self.lists))

    def _forces_of_lists(self, tolerance):
        """What gradients need of the lists of the first worker.

        That of all workers is made if it is missing, and lists if they are missing, or too coarse for the tolerance.
        """
        self._refine(tolerance)
        self._make_lists()
        workers = self.team.workers
        if workers[0].forces is None:
            basis, finest = self._frame.basis, self._finest * self._frame.sharpening
            self._unlisted = unlisted(basis, self.lists, PRIMITIVE_SHARE * finest)
            self.team.make_forces(finest)
        return workers[0].forces

    def _compile_ahead(self, use, operator, rehearse, part):
        """`Team.compile_for` a use; `rehearse(backend, basis, finest)` asks for what it needs."""
        basis, finest = self._frame.basis, self._finest * self._frame.sharpening
        self.team.compile_for(use, operator, lambda dry: rehearse(dry, basis, finest), self.progress, part)

    def _gradient(self, parts, omega, tolerance):
        """The gradient for a function of the operator that returns [(checked `Terms`, operator), ...]."""
        self._follow_molecule()

        def check():
            limit = FACTOR * self.direct_scf_tol if tolerance is None else checked_real("tolerance", tolerance, 0)
            check_order(4 * self.basis.lmax, derivative=1)
            return parts(self._operator(omega)), limit

        made, limit = self.ranks.together(check)
        facts = "the operator", "tolerance", "the number of densities", "coulomb", "exchange"
        for (densities, *factors), operator in made:
            values = operator, limit, len(densities), *(factor.tolist() for factor in factors)
            self.ranks.same(dict(zip(facts, values)))
        gradient, stats = 0.0, Statistics()
        for (densities, *factors), operator in made:
            found, of_part = self._gradient_of(self.ranks.broadcast(densities), factors, operator, limit)
            gradient = gradient + found
            stats.add(of_part)
        self.stats = stats
        return gradient

    def _check_densities(self, count):
        """MemoryLimitError where a CPU has no memory for so many densities of `Terms` with `_counted` ones and more."""
        if self.engine.backend.name == "cpu":
            what = f"{count} density matrices of {self.basis.nao} AOs, what makes them, and what is there already take"
            need = COPIES * count * 8 * self.basis.nao**2
            self.engine.backend.check_fits(need, what, "raise max_memory or give fewer at once")

    def _counted(self, densities):
        """A view of densities in host memory, which counts against the cap of a CPU as long as it is there."""
        backend = self.engine.backend
        return backend.memory.watch(densities.view()) if backend.name == "cpu" else densities

    def _in_frame(self, densities):
        """Densities in the order of md4, which count if they are a copy."""
        made = self._frame.densities(densities)
        return densities if made is densities else self._counted(made)

    def _on_primitives(self):
        """(JK, C, atoms): one on the CPU for `Basis.decontracted`, its coefficients, and the row of each of its shells.

        None if this object is as good. What it keeps for builds gives way to derivatives.
        """
        self._kept = np.empty((0, 0, 0))
        if self.engine.backend.name != "cpu" or self.basis.classes[:, 1].max() < MANY_FUNCTIONS:
            return None
        if self._primitives is None:
            basis, owner, given = self.basis.decontracted()
            make: Any = type(self)
            other = make(basis, None, "cpu", None, None, self.direct_scf_tol, self.progress, None, self._comm)
            mine, theirs = self.engine.backend, other.engine.backend
            theirs.memory, theirs.lock = mine.memory, mine.lock  # the lock, too: workspaces are kept with the memory
            coefficients = np.empty_like(given)
            coefficients[:, self._frame.order] = given
            atoms = np.searchsorted(self._ends, self._frame.order[self.basis.ao_loc[owner]], side="right")
            self._primitives = other, coefficients, atoms
        return self._primitives

    def _gradient_of(self, densities, factors, operator, tolerance):
        """(gradient, statistics) for agreed arguments."""
        densities, primitives = self._counted(densities), self._on_primitives()
        if primitives is not None:
            other, coefficients, atoms = primitives
            found, stats = other._gradient_of(coefficients @ densities @ coefficients.T, factors, operator, tolerance)
            gradient = np.zeros((len(self._ends), 3))
            np.add.at(gradient, atoms, found)
            return gradient, stats
        start, stats, theirs = time.perf_counter(), Statistics(), densities  # counted as long as there is the name
        densities = self._in_frame(theirs)
        if not self._has_pairs(tolerance):
            basis, finest = self._frame.basis, self._finest * self._frame.sharpening
            missing = unlisted(basis, [], PRIMITIVE_SHARE * finest)
            stats.error_bound = sqrt(3) * unlisted_bound([], [], missing, norms_of(basis, densities), *factors)
            return np.zeros((len(self._ends), 3)), stats
        given = (densities, *factors), tolerance
        part = "J alone" if not factors[1].any() else None if factors[0].any() else "exchange alone"
        basis = self._frame.basis
        if basis.mirror_axis is not None:  # a GPU takes other kernels for densities that break the plane
            part = part, mixes_parities(ao_parities(basis.classes, basis.pure, basis.mirror_axis), densities)
        self._compile_ahead("forces", operator, lambda *of: rehearse_forces(*of, *given), part)
        with self.engine.lock:
            forces = self._forces_of_lists(tolerance)
            of_blocks, more = (norms_of(basis, densities), *factors), []

            def meanwhile():
                more.append(unlisted_bound(forces.lists, forces.bounds, self._unlisted, *of_blocks))
                more.append(forces.passes(*of_blocks, tolerance))

            total = self.team.forces(operator, (densities, *of_blocks), tolerance, self.progress, meanwhile)
            if not more:
                meanwhile()
        self.ranks.sum(total)
        found, (computed, left, squares), stats.busy = total[0], total[1], tuple(total[2].tolist())
        stats.computed = stats.wanted = int(computed)
        bound, passes = more
        stats.skipped = passes * sum(map(len, self.lists)) ** 2 - stats.computed
        stats.error_bound, stats.error_estimate = float(left) + bound, float(np.sqrt(squares))
        if self._frame.rotation is not None:
            found = found @ self._frame.rotation
            # the largest component of a vector is at least its length over sqrt(3)
            stats.error_bound, stats.error_estimate = sqrt(3) * stats.error_bound, sqrt(3) * stats.error_estimate
        gradient = np.zeros((len(self._ends), 3))
        np.add.at(gradient, np.searchsorted(self._ends, self._frame.order[self.basis.ao_loc[:-1]], side="right"), found)
        stats.seconds = time.perf_counter() - start
        return gradient, stats
