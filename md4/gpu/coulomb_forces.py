"""The part of gradients on GPUs that J has without exchange (`md4.gpu.forces`), in the Hermite basis.

    Z[ab, p] = j f_ab D_ab J_p          J_p = sum_cd f_cd D_cd [p|cd), |p| <= l_ab + 1

J alone makes J_p of all pairs (`md4.gpu.hermite_coulomb`), as if the degree of each were higher by one. Of large
molecules most quartets count for J only, those whose pairs are far from each other. So J is made apart there, where it
takes little, and Gamma has exchange only.
"""

from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.hermite_coulomb import DeviceCoulomb
from md4.gpu.kernels.hermite_scales import TOP
from md4.gpu.kernels.pair_forces import launch_forces
from md4.gpu.reverse_ways import TaskSums, hermite_of
from md4.plan import QuartetRule
from md4.shells.schwarz import term_growth
from md4.shells.shell_pairs import overlapping

# J is made apart from exchange in a basis of at least so many shells, of whose pairs less than this part overlap. So
# many of these are looked at.
SHELLS, OVERLAPPING, PAIRS = 256, 0.7, 1 << 12
# By how much a bound may be above the tolerance and yet below it by rounding.
ROUNDING = 1e-12
# What a step of J in fixed point may be: this share of the tolerance, this (Hartree/Bohr), or this part of the largest
# |D| of a bra pair times the sum of the bounds of all ket pairs.
DIGITS_SHARE, DIGITS, RELATIVE_DIGITS = 0.25, 1e-13, 1e-15


def apart_from_exchange(basis):
    """Whether J is made apart from exchange where both are asked for.

    It depends on the basis only, on which all devices and ranks agree.
    """
    return basis.nshell >= SHELLS and overlapping(basis, PAIRS) < OVERLAPPING


class CoulombBounds:
    """Bounds of quartets without exchange, each of which is a product of two numbers of its pairs.

    Attributes
    ----------
    lists : list of md4.contract.screening.PairList
    bounds, of_prims : list of md4.shells.schwarz.GradientBounds
        Those of each list, and of the primitive pairs of each list.
    """

    lists: Any
    bounds: Any
    of_prims: Any

    def coulomb_rule(self, norms, root, tolerance):
        """(`md4.plan.QuartetRule`, function that returns: how many quartets count for `run`, bounds of the others).

        `norms`: the `block_norms` of a density, `root` the root of |j|. Without exchange the bound of a quartet is a
        product of two numbers of its pairs.
        """
        of_pairs = root * norms[tuple(self.shells.T)]
        own, derivative = (
            of_pairs * np.concatenate([getattr(bounds, name) for bounds in self.bounds])
            for name in ("own", "derivative")
        )  # fmt: skip

        def counted():
            order, falling = np.sort(own), np.sort(derivative)[::-1]
            with np.errstate(divide="ignore", invalid="ignore"):
                limits = np.where(falling > 0, tolerance * (1 + ROUNDING) / falling, np.inf)
            left = np.searchsorted(order, limits) if tolerance > 0 else np.zeros(len(own), dtype=np.int64)
            sums = (np.append(0, np.cumsum(order**n))[left] @ falling**n for n in (1, 2))
            return len(own) ** 2 - int(left.sum()), np.array([*sums])

        return self.product_rule(tolerance, derivative, own, max(1.0, root) * norms), counted

    def has_digits(self, norms, root, tolerance):
        """Whether J in fixed point is exact enough for forces of a density; arguments as of `coulomb_rule`.

        Its scales go by bounds, which a steep function raises for all pairs. But J of its own derivatives, with the
        largest bounds, vanishes for the most part. So a step of the fixed point, times D, may be more than it should.
        """
        of_pairs = root * norms[self.ends]
        return self.steps_are_small(of_pairs, "derivative", of_pairs, DIGITS_SHARE * tolerance)

    def has_digits_of_matrices(self, norms, tolerance):
        """The same for the elements of J of derivatives as matrices, for norms of all densities."""
        return self.steps_are_small(np.ones(1), "largest", norms.max(axis=0)[self.ends], tolerance)

    def steps_are_small(self, of_bras, name, of_kets, allowed):
        """Whether a step of J times the largest bound `name` of bra pairs is; for norms of bra and of ket pairs."""
        with np.errstate(invalid="ignore", over="ignore"):
            # BLAS would wake its threads for this
            largest, total = (of_bras * self.of_terms[name]).max(initial=0.0), (of_kets * self.of_terms["own"]).sum()
            most = max(allowed, DIGITS, RELATIVE_DIGITS * total * of_bras.max(initial=0.0))
            return bool(largest * total / TOP <= most)

    @cached_property
    def ends(self):
        """The shells a and b of all pairs of all lists."""
        return tuple(np.ascontiguousarray(self.shells.T))

    @cached_property
    def of_terms(self):
        """Bounds of all pairs by their name, for the terms of contracted ones."""
        tables = {name: [getattr(bounds, name) for bounds in self.bounds] for name in ("own", "derivative", "largest")}
        with np.errstate(invalid="ignore", over="ignore"):
            return {name: np.nan_to_num(np.concatenate(table) * self.term_ratios) for name, table in tables.items()}

    def product_rule(self, tolerance, derivative, own, norms):
        """The `md4.plan.QuartetRule` for bounds that are `derivative` of one pair times `own` of the other one.

        `norms` are those of the densities: whether FP32 has the range for them.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios, terms = np.where(derivative > 0, own / derivative, 0.0), derivative * self.term_ratios
        return QuartetRule(tolerance, self.shells, derivative, terms, ratios, norms, np.zeros(0, dtype=np.int32))

    @cached_property
    def shells(self):
        """Those of all pairs of all lists, one list after the other, shape (npair, 2)."""
        return np.concatenate([this.pairs.pairs for this in self.lists])

    @cached_property
    def term_ratios(self):
        """The larger one of T / F and T' / F' of each pair of all lists, T as in `md4.contract.screening`.

        The terms of a contracted pair, one for each primitive pair, have moduli below the bounds of these.
        """
        found = []
        for this, bounds, of_prims in zip(self.lists, self.bounds, self.of_prims):
            counts = np.diff(this.pairs.start)
            owner = np.repeat(np.arange(len(counts)), counts)
            sums = (np.bincount(owner, values, len(counts)) for values in (of_prims.own, of_prims.derivative))
            with np.errstate(divide="ignore", invalid="ignore"):
                both = [of_terms / of_pair for of_terms, of_pair in zip(sums, (bounds.own, bounds.derivative))]
            found.append(np.nan_to_num(np.fmax(*both), nan=1.0, posinf=np.inf) * term_growth(counts))
        return np.concatenate(found)


class CoulombForces:
    """What J adds to forces of `md4.gpu.forces.DeviceForces`, between the counts of exchange and exchange itself.

    Parameters
    ----------
    forces : md4.gpu.forces.DeviceForces
    backend : md4.gpu.backend.GpuBackend
    terms : list of tuple
        Of those whose J is made apart, D in device memory, the norms of its blocks and the factor j; or none.
    tolerance, part, parts
        As of `md4.cpu.forces.HostForces.run`.
    found : ndarray, shape (nshell, 3)
        To which derivatives are added.

    Attributes
    ----------
    quartets : int
    left_out : ndarray, shape (2,)
        As `md4.cpu.forces.HostForces.run` returns them, of the first part only.
    """

    def __init__(self, forces, backend, terms, tolerance, part, parts, found):
        self.forces, self.backend, self.found, self.pending, self.left = forces, backend, found, [], terms
        self.uncounted = []
        self.tolerance, self.part, self.parts = tolerance, part, parts
        self.quartets, self.left_out = 0, np.zeros(2)

    def begin(self, beside):
        """Has the device make J if there is memory for it beside what exchange has taken.

        `beside`: as of `md4.gpu.hermite_coulomb.DeviceCoulomb`.
        """
        if not self.left:
            return
        try:
            self.forces.check_memory_for_coulomb(self.backend)
        except MemoryLimitError:
            return  # to be begun when exchange has given its memory back
        self.make(beside)

    def end(self):
        """Adds all that J gives."""
        self.make()
        self.take()

    def make(self, beside=None):
        """Launches what is left, and adds what all densities but the last one give."""
        while self.left:
            this, beside = self.launched(*self.left.pop(0), beside), None  # work goes on in what this one gave back
            self.add()
            self.pending = this

    def add(self):
        """Adds the derivatives that were launched to those of the shells, once they are there."""
        self.forces.take(self.backend.context, self.found, self.pending)
        self.pending = []

    def take(self):
        """As `add`, and counts quartets, for which nothing on the device waits."""
        self.add()
        while self.uncounted:
            count, without = self.uncounted.pop()()
            self.quartets, self.left_out = self.quartets + count, self.left_out + without

    def launched(self, density, norms, factor, beside):
        """What `DeviceForces.take` is given of one density, which the device is given."""
        forces, backend, context = self.forces, self.backend, self.backend.context
        lists, root, pending = [this.prepared for this in forces.lists], np.sqrt(abs(factor)), []
        rule, counted = forces.coulomb_rule(norms, root, 0.0 if context.dry else self.tolerance)
        if self.part == 0:
            self.uncounted.append(counted)
        target = DeviceCoulomb(backend, forces.basis, [density], rule, lists, more=1, beside=beside)
        target.load(forces.with_room_for_h(backend, lists))
        for l_ket, l_bra in combinations_with_replacement(sorted(target.degrees), 2):
            target.add(l_bra, l_ket, self.part, self.parts)
        for task in forces.tasks(backend, range(len(lists)), []):
            whole = lists[task.number]
            this = whole[task.first : task.last]
            out, sums = context.pool.get(max(1, 6 * this.nprim)), TaskSums(context, this, hermite_of(this.facts), True)
            target.add_products(whole, this, 4 * factor, sums.fields(1))  # D in place of D + D^T, twice
            launch_forces(context, this, sums.hermite, sums.fields(1), 1, out)
            pending.append((task, out))
        target.forget()
        wait = backend.mark()
        return [(task, out, wait) for task, out in pending]
