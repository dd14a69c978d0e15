"""Ways through steps 2 to 5 on the GPU, one object each; `ranked` finds the fastest that two lists allow.

    thread_quartet   a thread makes a quartet, r and (ab|q] in registers: the smallest classes
    one_product      (ab|cd) = sum_p H[ab, p] s[p], where a side is of two s shells and the other product is but a sum
    fused            both products in one kernel, (ab|q] stays in registers: small and middle classes
    fused_wide       the same where several warps may share a quartet: some classes that are larger
    two_products     a kernel for each product, (ab|q] in memory: large classes; step 4 may be `whole_panel`
    plain            the same two products in plain multiply-adds: the readable one, and for GPUs without tensor cores

A path is asked about `Sides`, two lists in the order in which they would be transformed.
"""

from dataclasses import dataclass
from functools import cache
from math import isqrt, sqrt
from typing import NamedTuple

from md4.gpu import predicted_times
from md4.gpu.h_layout import (
    BRA_ELEMENTS,
    BRA_FLAT,
    BRA_MATRIX,
    BRA_STAIRCASE,
    KET_ELEMENTS,
    KET_MATRIX,
    KET_TURNED,
)
from md4.gpu.kernels import (
    digest_in_place,
    digestion,
    fused,
    fused_wide,
    one_product,
    plain,
    summed_r,
    thread_quartet,
    two_products,
    whole_panel,
)
from md4.gpu.predicted_times import Side
from md4.plan import SQUARE_BYTES, Plan

FEWEST_QUARTETS = 1 << 16  # that are worth a variant of a thread a quartet


class Sides(NamedTuple):
    """Two lists in the order in which they would be transformed.

    Attributes
    ----------
    unit : {'dmma16', 'dmma8', 'fma'}
        The device's arithmetic unit.
    bra, ket : Side
        The one that is transformed first, and the other.
    swap : bool
        Bra and ket have changed names.
    long : bool
        There are enough quartets for a thread each to fill the device.
    matrix : bool
        The integrals are a part of a matrix; see `md4.gpu.targets.DeviceBlock`.
    limited : bool
        Some quartets of the lists do not count, as in J and K.
    """

    unit: str
    bra: Side
    ket: Side
    swap: bool
    long: bool
    matrix: bool
    limited: bool = False

    @property
    def turned(self):
        """Whether functions ab of the side that is transformed first run fastest in the result."""
        return self.swap != self.matrix

    @property
    def given(self):
        """The sides in the order in which they were given."""
        return (self.ket, self.bra) if self.swap else (self.bra, self.ket)

    @property
    def facts(self):
        """The `ListFacts` of bra and ket."""
        return self.bra.facts, self.ket.facts


@dataclass(frozen=True)
class GpuPath:
    """What paths have in common; see `md4.backends.Path`.

    Each has `supports`, whether it can compute two `Sides`, and `forms`, the forms of H that it reads.
    """

    name: str
    merges_steps = True
    # Whether r and (ab|q] of a chunk are kept in memory.
    keeps_chunks = True
    # Whether classes that it is best for may be made in even and odd parts instead (`md4.method.mirror`). Whether it
    # computes such parts; then it has `transform` for steps 4 and 5.
    splits = takes_parts = False

    def digests(self, bra, ket):
        """Whether the integrals of two `ListFacts` can be digested into J and K by the kernel that makes them."""
        return False

    def cost(self, sides):
        """Predicted time in ns a quartet on an H200; 0 for paths that are the fastest wherever they can be taken."""
        return 0.0

    def __repr__(self):
        return self.name


class ThreadQuartet(GpuPath):
    """A thread a quartet: the fastest wherever there are enough quartets."""

    keeps_chunks = False

    def digests(self, bra, ket):
        return digest_in_place.takes(bra, ket)

    def supports(self, sides):
        """Small classes, long lists, in one order; no derivatives."""
        bra, ket = (side.facts for side in sides.given)
        fits = sides.long and not (bra.derivatives or ket.derivatives) and thread_quartet.takes(sides.unit, bra, ket)
        return fits and sides.swap == thread_quartet.swapped(bra, ket, sides.matrix)

    def forms(self, sides):
        return BRA_ELEMENTS, KET_ELEMENTS

    def run(self, steps, H_ab, H_cd, ab, cd, out):
        context, operator = steps.context, steps.operator
        facts = operator.kind, operator.parameter, ab.facts, cd.facts, out.turned, out.matrix
        context.fixed(thread_quartet.quartet_launcher, *facts)(context, H_ab.array, H_cd.array, ab, cd, out)


class OneProduct(GpuPath):
    """One product, where the ket is of two s shells: the fastest after a thread a quartet."""

    def supports(self, sides):
        """A side of two s shells; if both are, the one with more primitives becomes the ket."""
        (bra, mean_bra), (ket, mean_ket) = sides.given
        if sides.unit == "fma" or 1 not in (bra.nherm, ket.nherm):
            return False
        return sides.swap == (bra.nherm == 1 and (ket.nherm > 1 or mean_bra > mean_ket))

    def forms(self, sides):
        return BRA_FLAT, KET_MATRIX

    def run(self, steps, H_ab, H_cd, ab, cd, out):
        weights = H_cd.array
        if summed_r.needed(cd):
            r, weights = summed_r.sums_of(steps, weights, ab, cd, out), None
        else:
            r = steps.r(ab, cd, out)
        launch = steps.context.fixed(one_product.one_product_launcher, ab.facts, cd.facts)
        launch(steps.context, H_ab.array, r, weights, ab, cd, out)


class Fused(GpuPath):
    """Both products in one kernel."""

    splits = takes_parts = True
    launcher = staticmethod(fused.fused_launcher)

    def supports(self, sides):
        return bool(fused.choose_fused(sides.unit, *sides.facts))

    def forms(self, sides):
        return BRA_STAIRCASE, KET_TURNED

    def cost(self, sides):
        return predicted_times.fused_time(sides.bra, sides.ket, sides.turned, sides.matrix, sides.limited)

    def run(self, steps, H_ab, H_cd, ab, cd, out):
        self.transform(steps, H_ab, H_cd, ab, cd, steps.r(ab, cd, out), out)

    def transform(self, steps, H_ab, H_cd, ab, cd, r, out):
        """Steps 4 and 5."""
        facts, limited = (ab.facts, cd.facts), out.limits[0].size > 0
        launch = steps.context.fixed(self.launcher, *facts, out.matrix, limited)
        launch(steps.context, H_ab.array, r, H_cd.array, ab, cd, out)


class FusedWide(Fused):
    """Both products in one kernel, where several warps may share a quartet; pairs of one primitive pair each."""

    takes_parts, launcher = False, staticmethod(fused_wide.wide_launcher)

    def supports(self, sides):
        """Classes that the fused kernel does not take in groups of ket pairs."""
        tile = fused.choose_fused(sides.unit, *sides.facts)
        return not (tile and tile.kets) and bool(fused_wide.wide_tile(sides.unit, *sides.facts))

    def cost(self, sides):
        return predicted_times.wide_time(sides.bra, sides.ket, sides.turned, sides.matrix)


def bra_launcher(context, bra, ket):
    """The launcher of step 4 for two `ListFacts`, of the kernel that serves them."""
    kernel = whole_panel if whole_panel.serves(context.unit, bra, ket) else two_products
    return kernel.bra_launcher(context, bra, ket)


class TwoProducts(GpuPath):
    """A kernel for each product, on tensor cores."""

    merges_steps, splits, takes_parts = False, True, True

    def supports(self, sides):
        return sides.unit != "fma"

    def forms(self, sides):
        return two_products.bra_form(sides.unit, sides.bra.facts), two_products.ket_form(sides.turned)

    def cost(self, sides):
        return predicted_times.two_products_time(*sides[:3], sides.turned, sides.limited)

    def transform_bra(self, steps, H_ab, ab, cd, r, out):
        """Step 4: (ab|q] of a chunk, [p|q] assembled in the operands."""
        context = steps.context
        abq = context.pool.room("abq", two_products.abq_size(ab, cd))
        if cd.nprim:
            context.fixed(bra_launcher, ab.facts, cd.facts)(context, H_ab.array, ab, cd, r, abq, out.limits)
        return abq

    def transform_ket(self, steps, abq, H_cd, ab, cd, out):
        """Step 5: (ab|cd) of a chunk into a `DeviceBlock`."""
        launch = steps.context.fixed(two_products.ket_launcher, ab.facts, cd.facts, H_cd.form)
        launch(steps.context, abq, H_cd.array, ab, cd, out)

    def transform(self, steps, H_ab, H_cd, ab, cd, r, out):
        """Steps 4 and 5."""
        self.transform_ket(steps, self.transform_bra(steps, H_ab, ab, cd, r, out), H_cd, ab, cd, out)


class Plain(GpuPath):
    """The same in plain multiply-adds, `md4.gpu.kernels.plain`; read this one first."""

    merges_steps = False

    def supports(self, sides):
        return sides.unit == "fma"

    def forms(self, sides):
        return BRA_MATRIX, KET_MATRIX

    def cost(self, sides):
        return predicted_times.two_products_time(*sides[:3], sides.turned)

    def transform_bra(self, steps, H_ab, ab, cd, r, out):
        """Step 4: (ab|q] of a chunk."""
        abq = steps.context.pool.room("abq", two_products.abq_size(ab, cd))
        if cd.nprim:
            plain.launch_plain_bra(steps.context, H_ab.array, ab, cd, r, abq)
        return abq

    def transform_ket(self, steps, abq, H_cd, ab, cd, out):
        """Step 5: (ab|cd) of a chunk into a `DeviceBlock`."""
        plain.launch_plain_ket(steps.context, abq, H_cd.array, ab, cd, out)


# Where predicted times are equal, as of the first two, the earlier one is taken.
PATHS = (
    ThreadQuartet("thread_quartet"), OneProduct("one_product"), Fused("fused"), FusedWide("fused_wide"),
    TwoProducts("two_products"), Plain("plain"),
)  # fmt: skip


def timed_plans(unit, bra, ket, long, matrix=False, limited=False):
    """(predicted time, plan) of all plans for two `Side`, the one with the least time first; see `Sides`."""
    of_both = long, matrix, limited
    orders = Sides(unit, bra, ket, False, *of_both), Sides(unit, ket, bra, True, *of_both)
    found = [(path.cost(sides), path, sides) for path in PATHS for sides in orders if path.supports(sides)]
    found.sort(key=lambda entry: entry[0])
    return [(time, Plan(path, sides.swap, *path.forms(sides), matrix)) for time, path, sides in found]


@cache
def build_time(unit, bra, ket, matrices):
    """Predicted ns of a quartet of two `Side` of long lists in J and K: the integrals, and their digestion."""
    time = timed_plans(unit, bra, ket, True, limited=True)[0][0] or predicted_times.low_time(bra, ket)
    return time + predicted_times.digest_time(bra, ket, matrices)


@cache
def square_pairs(unit, side):
    """Number of pairs of a long list, a `Side`, whose integrals with each other are made at once for Schwarz bounds.

    Only the diagonal of each square of pairs is used. N pairs in squares of n take N/n evaluations of the host and N n
    quartets of the device. The sum of both times, and the longer one of the two, is least where they are the same.
    """
    fastest = round(sqrt(predicted_times.EVALUATION / build_time(unit, side, side, 0)))
    return max(1, min(fastest, isqrt(SQUARE_BYTES // 8) // side.facts.nab))


@cache
def ranked(unit, bra, ket, *options):
    """The plans of `timed_plans`, in the same order; the same `options`."""
    return tuple(plan for _, plan in timed_plans(unit, bra, ket, *options))


def plans(unit, bra, ket, matrix=False, limited=False):
    """All plans for two `ShellPairs` or slices, the one that is taken first; `bench/lab/variants.py` times them."""
    return ranked(unit, Side.of(bra), Side.of(ket), is_long(bra, ket), matrix, limited)


def is_long(bra, ket):
    """Whether two lists have enough quartets for a thread each to fill the device."""
    return bra.npair * ket.npair >= FEWEST_QUARTETS


def digest_order(unit, bra, ket, long=None):
    """Whether two `ShellPairs`, or prepared lists, change places for J and K.

    Where a thread makes what it digests, the plan says which is the bra, if it prefers one. Else digestion does.
    `long`: as if the lists were long, or short.
    """
    long = is_long(bra, ket) if long is None else long
    plan = ranked(unit, Side.of(bra), Side.of(ket), long, False, True)[0]
    first, second = (ket, bra) if plan.swap else (bra, ket)
    in_place = plan.path.digests(first.facts, second.facts)
    if in_place and thread_quartet.prefers(bra, ket):
        return plan.swap
    return digestion.digest_swapped(bra, ket, in_place)
