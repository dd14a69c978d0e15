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

from md4.gpu.h_layout import BRA_PLAIN, BRA_STAIRS, KET_TURNED, KET_WEIGHTS
from md4.gpu.kernels import resident
from md4.gpu.kernels.fused import choose_fused
from md4.gpu.kernels.two_products import bra_form, bra_tile, ket_form, ket_tile
from md4.gpu.staircases import class_of, reach
from md4.gpu.tuning import blocks_of_8, panel_rows, r_stride
from md4.plan import Plan, single_swapped

# ns for each multiply-add of step 4 and of step 5, byte of (ab|q], of the result, of the result if bra and ket change
# names, of r, and for each quartet
TWO = (4.87e-5, 6.03e-5, 1.6e-4, 6.56e-5, 1.7e-4, 1.14e-3, 0.318)
# of step 4 where the panel of H is resident
RESIDENT = 2.86e-5
# as TWO with [p|q] gathered, in elements, in place of (ab|q]
FUSED = (2.93e-5, 7.95e-5, 1.63e-4, 9.39e-5, 2.26e-5, 2.38e-4, 0.34)


class Side(NamedTuple):
    """What counts of a pair list: l, functions, Hermite functions, most and mean primitives of a pair, its staircase.

    `rows` and `rows_by_16`: sum over blocks of 8 Hermite functions of the rows that count, in blocks of 8 and of 16.
    """

    l: int
    nab: int
    nherm: int
    max_prim: int
    mean_prim: float
    rows: int
    rows_by_16: int

    @classmethod
    def of(cls, pairs):
        return cls(
            pairs.l, pairs.nab, pairs.nherm, pairs.max_prim, round(pairs.mean_prim, 1), *counted_rows(class_of(pairs))
        )


@cache
def counted_rows(shells):
    """(`rows`, `rows_by_16`) of a `Side`."""
    found = reach(shells)
    return int(8 * found.sum()), int(16 * ((found + 1) // 2).sum())


def cost(unit, plan, bra, ket):
    """Predicted ns a quartet of a plan with 'two' or 'fused' kernels; `bra` and `ket` are `Side`."""
    if plan.swap:
        bra, ket = ket, bra
    np8, nq8, k = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm), bra.mean_prim * ket.mean_prim
    if plan.kernels == "fused":
        rows4, rows5 = bra.rows_by_16, ket.rows
        columns5, passed_on, factors = (bra.nab + 15) // 16 * 16, 64 * np8 * nq8 * k, FUSED
    else:
        rows4 = tile_rows(bra_tile(unit, bra), bra)
        rows5, columns5 = tile_rows(ket_tile(unit, ket, plan.ket_form), ket, not plan.swap), bra.nab
        passed_on, factors = 64 * nq8 * bra.nab * ket.mean_prim, TWO
        if resident.serves(unit, bra, ket):
            factors = (RESIDENT, *TWO[1:])
    out = 8 * bra.nab * ket.nab
    amounts = (
        rows4 * 64 * nq8 * k, rows5 * columns5 * 8 * ket.mean_prim, passed_on, out, out * plan.swap,
        8 * r_stride(bra.l + ket.l) * k, 1,
    )  # fmt: skip
    return sum(factor * amount for factor, amount in zip(factors, amounts))


def tile_rows(tile, side, flat=False):
    """Rows of a product that a tile multiplies, summed over blocks of 8 Hermite functions; all of them if `flat`."""
    if tile.unit == "fma" or flat:
        return 8 * panel_rows(side.nab) * blocks_of_8(side.nherm)
    return side.rows if tile.turned else side.rows_by_16


@cache
def ranked(unit, bra, ket):
    """Plans of two `Side` but a thread a quartet: one product where there is one, then by predicted time."""
    swap, found = single_swapped(bra, ket), []
    for order in (False, True):
        first, second = (ket, bra) if order else (bra, ket)
        if choose_fused(unit, first, second):
            found.append(Plan(order, "fused", BRA_STAIRS, KET_TURNED))
        found.append(Plan(order, "two", bra_form(unit, first), ket_form(unit, second, order)))
    found.sort(key=lambda plan: cost(unit, plan, bra, ket))
    return ([Plan(swap, "single", BRA_PLAIN, KET_WEIGHTS)] if swap is not None and unit != "fma" else []) + found
