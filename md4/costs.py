"""Which plan of the GPU backend is the fastest for a class: a predicted time for each.

A time, in ns a quartet on an H200, is a sum over what a plan has to do: multiply-adds of both products with all their
padding, (ab|q] and r that go through memory, the result. The coefficients are non-negative least-squares fits to
measured times: of two kernels to 206 plans of 103 classes up to (ii|ii), all of `bench/results/plans_sample.csv` that a
thread a quartet does not take, of the fused kernel to all classes up to (hh|hh) that it serves, K = 1. They
reproduce them to 11% and 7%, root mean square. Taking the plan with the least predicted time costs 0.6% against
always taking the fastest in those 103 classes (geometric mean).
"""

from functools import cache
from typing import NamedTuple

from md4.kernels import resident
from md4.kernels.fused import choose_fused
from md4.kernels.transform import bra_form, bra_tile, ket_form, ket_tile
from md4.plan import Plan, single_swapped
from md4.tiles import blocks_of_8, panel_rows, r_stride

# ns for each multiply-add of step 4 and of step 5, byte of (ab|q], of the result, of the result if bra and ket change
# names, of r, and for each quartet
TWO = (4.67e-5, 6.06e-5, 6.25e-5, 7.84e-5, 1.65e-4, 9.51e-4, 0.534)
# of step 4 where the panel of H is resident
RESIDENT = 3.57e-5
# as TWO with [p|q] gathered, in elements, in place of (ab|q]
FUSED = (4.57e-5, 5.87e-5, 3.45e-5, 1.83e-4, 6.7e-6, 2.4e-5, 0.535)


class Side(NamedTuple):
    """What counts of a pair list: l, functions, Hermite functions, most and mean primitives of a pair."""

    l: int
    nab: int
    nherm: int
    max_prim: int
    mean_prim: float

    @classmethod
    def of(cls, pairs):
        return cls(pairs.l, pairs.nab, pairs.nherm, pairs.max_prim, round(pairs.mean_prim, 1))


def cost(unit, plan, bra, ket):
    """Predicted ns a quartet of a plan with 'two' or 'fused' kernels; `bra` and `ket` are `Side`."""
    if plan.swap:
        bra, ket = ket, bra
    np8, nq8, k = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm), bra.mean_prim * ket.mean_prim
    if plan.kernels == "fused":
        rows4 = rows5 = (bra.nab + 15) // 16 * 16
        columns5, passed_on, factors = 8 * blocks_of_8(ket.nab), 64 * np8 * nq8 * k, FUSED
    else:
        rows4 = padded_rows(bra_tile(unit, bra), bra.nab)
        rows5, columns5 = padded_rows(ket_tile(unit, ket, plan.ket_form), ket.nab), bra.nab
        passed_on, factors = 64 * nq8 * bra.nab * ket.mean_prim, TWO
        if resident.serves(unit, bra, ket):
            factors = (RESIDENT, *TWO[1:])
    out = 8 * bra.nab * ket.nab
    amounts = (
        rows4 * 64 * np8 * nq8 * k, rows5 * columns5 * 8 * nq8 * ket.mean_prim, passed_on, out, out * plan.swap,
        8 * r_stride(bra.l + ket.l) * k, 1,
    )  # fmt: skip
    return sum(factor * amount for factor, amount in zip(factors, amounts))


def padded_rows(tile, nrow):
    """Rows of a product with its padding."""
    return 8 * (blocks_of_8(nrow) if tile.turned else panel_rows(nrow))


@cache
def ranked(unit, bra, ket):
    """Plans of two `Side` but a thread a quartet: one product where there is one, then by predicted time."""
    swap, found = single_swapped(bra, ket), []
    for order in (False, True):
        first, second = (ket, bra) if order else (bra, ket)
        if choose_fused(unit, first, second):
            found.append(Plan(order, "fused", "bra", "right"))
        found.append(Plan(order, "two", bra_form(unit, first), ket_form(unit, second, order)))
    found.sort(key=lambda plan: cost(unit, plan, bra, ket))
    return ([Plan(swap, "single", "bra", "weight")] if swap is not None and unit != "fma" else []) + found
