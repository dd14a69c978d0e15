"""Which plan of the GPU backend is the fastest for a class: a predicted time for each.

A time, in ns a quartet on an H200, is a sum over what a plan has to do: multiply-adds of both products with their
padding, less what staircases save (`md4.gpu.staircases`), (ab|q] and r that go through memory, the result. The
coefficients are non-negative least-squares fits to measured times of 103 classes up to (ii|ii), all of
`bench/results/plans_sample.csv` that a thread a quartet does not take, K = 1: 206 plans with two kernels and 39 with
the fused one. They reproduce them to 10% and 7%, root mean square. Taking the plan with the least predicted time costs
0.5% against always taking the fastest in those classes (geometric mean).
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.kernels import whole_panel
from md4.gpu.kernels.fused import fused_tile
from md4.gpu.kernels.two_products import bra_tile, ket_form, ket_tile
from md4.gpu.r_layout import r_stride_of
from md4.gpu.staircases import reach
from md4.gpu.tiles import blocks_of_8, panel_rows
from md4.method.angular import nherm
from md4.shells.shell_pairs import ListFacts

# ns for each multiply-add of step 4 and of step 5, byte of (ab|q], of the result, of the result if bra and ket change
# names, of r, and for each quartet
TWO = (4.87e-5, 6.03e-5, 1.6e-4, 6.56e-5, 1.7e-4, 1.14e-3, 0.318)
# of step 4 where the panel of H of uncontracted bras stays in shared memory
RESIDENT = 2.86e-5
# of step 4, in whole blocks of 8 rows, and of r for contracted bras of few functions (`md4.gpu.kernels.whole_panel`): a
# fit to 82 measured times of 31 classes, good to 8%, root mean square (`bench/results/plans_contracted.csv`)
CONTRACTED = 2.66e-5, 5.51e-4
# as TWO with [p|q] gathered, in elements, in place of (ab|q]
FUSED = (2.93e-5, 7.95e-5, 1.63e-4, 9.39e-5, 2.26e-5, 2.38e-4, 0.34)
# and for each byte of the result where that is a part of a matrix
FUSED_MATRIX = 3e-4
# Contracted bras take so many times as long in the fused kernel: a fit to 35 of these times, good to 11%.
FUSED_CONTRACTED = 1.21
# Where some quartets do not count, so many times, and ns for each primitive quartet, by eye (J and K of benzene in
# cc-pVQZ and cc-pV5Z by kernel, `bench/results/jk_plane.log`). `CONTRACTED` is not used there: two kernels leave out
# whole blocks of quartets only, and builds were not faster with it (`bench/LAB_NOTES.md`).
FUSED_CONTRACTED_LIMITED = 1.4, 0.25
# Groups of ket pairs take so many times the fused kernel's time, r left aside, and of
# contracted bras ns for each primitive quartet, too. Fits to measured times of 22 and 9 classes and parts of such, good
# to 10% and 6%, root mean square (`bench/results/ket_groups.log`).
GROUPS, GROUPS_CONTRACTED = 0.83, (0.99, 0.09)
# Where several warps may share a quartet (`md4.gpu.kernels.fused_wide`), so many times the fused kernel's time, r left
# aside: by eye, from 13 measured classes (`bench/results/wide.log`).
WIDE = 0.95

# ns of the host for an evaluation of few quartets and for the kernel that takes the diagonal of its block
EVALUATION = 1e5


class Side(NamedTuple):
    """What counts of a pair list: its `ListFacts`, and the `rounded_mean` of primitive pairs of a pair."""

    facts: ListFacts
    mean_prim: float

    @classmethod
    def of(cls, pairs):
        """Of `ShellPairs` or `PreparedPairs`, or of slices of them."""
        return cls(pairs.facts, rounded_mean(pairs))


def rounded_mean(pairs):
    """Mean number of primitive pairs to the nearest tenth: means that differ by less are not told apart."""
    npair = pairs.npair or 1
    return (20 * pairs.nprim + npair) // (2 * npair) / 10


@cache
def counted_rows(facts, size):
    """Sum over blocks of 8 Hermite functions of the rows of a list that count, in blocks of `size`, 8 or 16."""
    return int(size * -(-8 * reach(facts.h_class) // size).sum())


def two_products_time(unit, bra, ket, turned, limited=False):
    """Predicted ns a quartet of two kernels; `bra` is transformed first, `turned`: it runs fastest in the result.

    `limited`: some quartets of the lists do not count.
    """
    (ab, _), (cd, mean_prim), (rows4, step4, r) = bra, ket, step4_of(unit, bra.facts, ket.facts, limited)
    rows5 = tile_rows(ket_tile(unit, cd, ket_form(turned)), cd, not turned)
    passed_on = 64 * blocks_of_8(cd.nherm) * ab.nab * mean_prim
    return time_of(bra, ket, turned, (step4, *TWO[1:5], r, TWO[6]), rows4, rows5 * ab.nab, passed_on)


def step4_of(unit, bra, ket, limited):
    """Of the kernel for two `ListFacts`: rows that it multiplies, as `tile_rows`, ns as in `TWO` for these and r."""
    whole, contracted = whole_panel.serves(unit, bra, ket), bra.max_prim > 1
    if whole and contracted and not limited:
        return 8 * blocks_of_8(bra.nab) * blocks_of_8(bra.nherm), *CONTRACTED
    factor = RESIDENT if whole and not contracted else TWO[0]
    return tile_rows(bra_tile(unit, bra), bra), factor, TWO[5]


def unsplit_time(bra, ket, turned):
    """Sum of all that both products have to do if [p|q] and (ab|q] stay in registers."""
    ab, cd = bra.facts, ket.facts
    columns5, passed_on = (ab.nab + 15) // 16 * 16, 64 * blocks_of_8(ab.nherm) * blocks_of_8(cd.nherm)
    areas = counted_rows(ab, 16), counted_rows(cd, 8) * columns5
    return time_of(bra, ket, turned, FUSED, *areas, passed_on * bra.mean_prim * ket.mean_prim)


def fused_time(bra, ket, turned, matrix=False, limited=False):
    """Predicted ns a quartet of the fused kernels, whose result may be a part of a matrix; see `two_products_time`.

    There must be a tile for the lists (`fused_tile`).
    """
    time, ab, cd = unsplit_time(bra, ket, turned), bra.facts, ket.facts
    if fused_tile(ab, cd).kets:
        r = r_time(bra, ket)
        times, primitive = (GROUPS, 0.0) if ab.max_prim == 1 else GROUPS_CONTRACTED
        time = r + times * (time - r) + primitive * bra.mean_prim * ket.mean_prim
    elif ab.max_prim > 1:
        times, primitive = FUSED_CONTRACTED_LIMITED if limited else (FUSED_CONTRACTED, 0.0)
        time = times * time + primitive * bra.mean_prim * ket.mean_prim
    return time + matrix * FUSED_MATRIX * 8 * ab.nab * cd.nab


def wide_time(bra, ket, turned, matrix=False):
    """Predicted ns a quartet of the fused kernel whose quartets several warps may share; see `fused_time`."""
    r, out = r_time(bra, ket), 8 * bra.facts.nab * ket.facts.nab
    return r + WIDE * (unsplit_time(bra, ket, turned) - r) + matrix * FUSED_MATRIX * out


def time_of(bra, ket, turned, factors, rows4, area5, passed_on):
    """Sum of all that a plan has to do, each times its coefficient."""
    k, out = bra.mean_prim * ket.mean_prim, 8 * bra.facts.nab * ket.facts.nab
    amounts = (
        rows4 * 64 * blocks_of_8(ket.facts.nherm) * k, area5 * 8 * ket.mean_prim, passed_on, out, out * turned,
        8 * r_stride_of(bra.facts, ket.facts) * k, 1,
    )  # fmt: skip
    return sum(factor * amount for factor, amount in zip(factors, amounts))


def r_time(bra, ket):
    """Predicted ns a quartet of making r, which is most of what the fused kernel takes for it."""
    return FUSED[5] * 8 * r_stride_of(bra.facts, ket.facts) * bra.mean_prim * ket.mean_prim


# To divide work among devices, times of small classes, of digestion and of J alone are needed, too. They are fits to
# the pairs of lists of three builds (8 and 27 waters in cc-pVTZ, benzene in cc-pV5Z), good to 40%, root mean square.


def low_time(bra, ket):
    """Predicted ns a quartet of the paths of small classes: r of each primitive quartet, both products, the result."""
    (ab, mean_bra), (cd, mean_ket) = bra, ket
    primitives = 7.2e-3 * nherm(ab.l + cd.l) + 4.9e-4 * ab.nherm * cd.nherm
    return 0.07 + mean_bra * mean_ket * primitives + 2.3e-3 * ab.nab * cd.nab


def digest_time(bra, ket, matrices):
    """Predicted ns for a quartet's digestion with some density matrices.

    That of even and odd parts takes as long: it is bound by additions, of which there are as many.
    """
    return 2.1e-3 * bra.facts.nab * ket.facts.nab * matrices


def coulomb_time(bra, ket, matrices):
    """Predicted ns a quartet of J in the Hermite basis: r of each primitive quartet, times both densities."""
    return bra.mean_prim * ket.mean_prim * (0.017 + 1.2e-3 * bra.facts.nherm * ket.facts.nherm * matrices)


def tile_rows(tile, facts, flat=False):
    """Rows of a product that a tile multiplies, summed over blocks of 8 Hermite functions; all of them if `flat`."""
    if tile.unit == "fma" or flat:
        return 8 * panel_rows(facts.nab) * blocks_of_8(facts.nherm)
    return counted_rows(facts, 8 if tile.turned else 16)
