"""Scales of sums J_p in fixed point: with them, integers are added up, and a sum has the same bits in any order.

Of positive operators r12^-1 and its like, [p|q] is a scalar product of p and q, so by Cauchy and Schwarz

    |J_p| = |sum_q [p|q] D_q| <= [p|p]^1/2 sum_q [q|q]^1/2 |D_q|

for any of the q, hence for each addend, too. The scale of J_p is `TOP` over this bound, so no addend and no sum exceeds
TOP, a quarter of what a 64-bit integer holds. [p|p] is that of a primitive pair with itself, where R = 0:

    [p|p] = (-1)^n [0]^(n) (2 t - 1)!! (2 u - 1)!! (2 v - 1)!! ,      n = t + u + v
"""

from functools import cache
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i64, jit_device
from md4.gpu.emit.scalars import quotient
from md4.gpu.hermite_rows import row_ordinals, row_words
from md4.gpu.kernels.primitive_quartets import OperatorArguments, operator_arguments
from md4.method import operators
from md4.method.angular import hermite_triples

# The largest modulus of a sum, and the largest scale: sums below TOP / MOST are zero.
TOP, MOST = 2.0**61, 2.0**1000
THREADS, BLOCKS = 256, 32  # of the sum over the functions of a degree
SCALE_BLOCKS = 4096  # most blocks that make scales
# erfc's [0]^(n) is a difference, which may be less than its rounding: so much of Coulomb's is added.
ROUNDING = 2.0**-40


class HermiteFunctions(NamedTuple):
    """The Hermite functions of the primitive pairs of a degree, in their rows.

    Attributes
    ----------
    records : float64 array
        As of `md4.gpu.kernels.coulomb_threads.OrderedSide`.
    words : int32 array
        The packed function at each place of a row.
    factors : float64 array
        Square roots of the products of double factorials, 0 where there is no function.
    """

    records: F64
    words: I32
    factors: F64


@cache
def row_factors(l, mirrored):
    """`HermiteFunctions.factors` of a row of functions up to degree l."""
    triples, ordinals = hermite_triples(l).tolist(), row_ordinals(l, mirrored).tolist()
    odd = [prod(range(1, 2 * t, 2)) for t in range(l + 1)]
    return np.array([sqrt(prod(odd[t] for t in triples[n])) if n >= 0 else 0.0 for n in ordinals])


def make_norm(kind):
    """Device function: [p|p]^1/2 of the function at place n of all rows of a degree, 0 where there is none."""
    zero_of, rounding = operators.zero_function(kind, jit_device), ROUNDING if kind == "erfc" else 0.0
    coulomb_of = operators.zero_function("coulomb", jit_device)

    def norm(functions, n, operator):
        prim, width = quotient(n, functions.words.size), functions.words.size
        place = n - prim * width
        if functions.factors[place] == 0.0:
            return 0.0
        degree, p = functions.words[place] >> 24, functions.records[4 * prim]
        square = abs(zero_of(degree, p, p, 0.0, operator.parameter, operator.table))
        if rounding > 0.0:
            square += rounding * abs(coulomb_of(degree, p, p, 0.0, operator.parameter, operator.table))
        return sqrt(square) * functions.factors[place]

    return jit_device(norm)


def block_sum(value, sums, tid):
    """The sum over a block of `THREADS` threads, in a fixed order and in all of them (device function)."""
    sums[tid] = value
    half = THREADS >> 1
    while half > 0:
        cuda.syncthreads()
        if tid < half:
            sums[tid] += sums[tid + half]
        half >>= 1
    cuda.syncthreads()
    return sums[0]


def density_norms(kind):
    """Kernel factory: parts[block] = what a block finds of sum_q [q|q]^1/2 |D_q| over a degree."""
    norm, add_up, threads = make_norm(kind), jit_device(block_sum), THREADS

    def kernel(functions: HermiteFunctions, operator: OperatorArguments, d: F64, parts: F64):
        sums, tid, total = cuda.shared.array(threads, f64), i64(cuda.threadIdx.x), 0.0
        n = i64(cuda.blockIdx.x) * threads + tid
        while n < d.size:
            total += norm(functions, n, operator) * abs(d[n])
            n += i64(cuda.gridDim.x) * threads
        total = add_up(total, sums, tid)
        if tid == 0:
            parts[cuda.blockIdx.x] = total

    return Kernel(kernel)


def hermite_scales(kind):
    """Kernel factory: the scales of all J_p of a degree, from all that `density_norms` has found."""
    norm, add_up, threads, top, most = make_norm(kind), jit_device(block_sum), THREADS, TOP, MOST

    def kernel(functions: HermiteFunctions, operator: OperatorArguments, parts: F64, scales: F64):
        sums, tid, total = cuda.shared.array(threads, f64), i64(cuda.threadIdx.x), 0.0
        for n in range(tid, parts.size, threads):
            total += parts[n]
        total = add_up(total, sums, tid)
        n = i64(cuda.blockIdx.x) * threads + tid
        while n < scales.size:
            bound, scale = norm(functions, n, operator) * total, most
            # no number stays no number, here and in what is made of it
            if not bound <= top / most:
                scale = top / bound
            scales[n] = scale
            n += i64(cuda.gridDim.x) * threads

    return Kernel(kernel)


# launchers


def functions_of(context, degree):
    """`HermiteFunctions` of a `md4.gpu.hermite_coulomb.Degree`."""
    of_rows = degree.l, degree.mirrored
    return degree.records, context.table(row_words, *of_rows), context.table(row_factors, *of_rows)


def launch_scales(context, operator, degrees, parts):
    """Makes the scales of J of each density of all `degrees`, for what has been brought to D.

    `parts` is room for `BLOCKS` numbers of each degree.
    """
    kind, arguments = operator.kind, operator_arguments(context, operator.kind, operator.parameter)
    given = [(degree, functions_of(context, degree)) for degree in degrees]
    for number in range(len(degrees[0].densities) if degrees else 0):
        for n, (degree, functions) in enumerate(given):
            part = parts.part(n * BLOCKS, (BLOCKS,))
            context.launch(
                Variant(density_norms, (kind,)), BLOCKS, THREADS, 0, functions, arguments, degree.densities[number],
                part,
            )  # fmt: skip
        for degree, functions in given:
            scales = degree.scales[number]
            blocks = min(SCALE_BLOCKS, -(-scales.size // THREADS))
            if blocks:
                context.launch(
                    Variant(hermite_scales, (kind,)), blocks, THREADS, 0, functions, arguments, parts, scales
                )  # fmt: skip
