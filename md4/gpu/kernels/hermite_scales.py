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
from md4.gpu.hermite_rows import row_ordinals, row_words
from md4.gpu.kernels.primitive_quartets import OperatorArguments, operator_arguments
from md4.method import operators
from md4.method.angular import hermite_triples

# The largest modulus of a sum. The largest scale: where a bound is below TOP / MOST, sums have fewer digits.
TOP, MOST = 2.0**61, 2.0**1000
# Of [0]^(n), where it vanishes as omega^(2n + 1): a bound of sums with functions of lower degree, which do not.
LEAST_ZERO = 1e-300
THREADS = 256  # of a block
WARPS = THREADS // 32
BLOCKS = 128  # of the sum over the functions of a degree
SCALE_BLOCKS = 4096  # most blocks that make scales


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
    """Device function: [0]^(n) of a primitive pair with itself under a square root, n = 0 to `l` by lane, else 0."""
    zero_of, least = operators.zero_function(kind, jit_device), LEAST_ZERO

    def norm(functions, prim, l, operator, lane):
        if lane > l:
            return 0.0
        p = functions.records[4 * prim]
        zero = abs(zero_of(lane, p, p, 0.0, operator.parameter, operator.table))
        return sqrt(least if zero < least else zero)  # no number stays no number

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
    """Kernel factory: parts[block] = what a block finds of sum_q [q|q]^1/2 |D_q| over a degree l, a warp a pair."""
    norm, add_up, threads, warps = make_norm(kind), jit_device(block_sum), THREADS, WARPS

    def kernel(functions: HermiteFunctions, l: i64, nprim: i64, operator: OperatorArguments, d: F64, parts: F64):
        sums, tid, total = cuda.shared.array(threads, f64), i64(cuda.threadIdx.x), 0.0
        lane, width = tid & 31, functions.words.size
        prim = i64(cuda.blockIdx.x) * warps + (tid >> 5)
        while prim < nprim:
            root, place = norm(functions, prim, l, operator, lane), lane
            while place - lane < width:
                here = min(place, width - 1)
                value = cuda.shfl_sync(-1, root, functions.words[here] >> 24) * functions.factors[here]
                if place < width and value > 0.0:
                    total += value * abs(d[prim * width + place])
                place += 32
            prim += i64(cuda.gridDim.x) * warps
        total = add_up(total, sums, tid)
        if tid == 0:
            parts[cuda.blockIdx.x] = total

    return Kernel(kernel)


def hermite_scales(kind):
    """Kernel factory: the scales of all J_p of a degree l, from all that `density_norms` has found; a warp a pair."""
    norm, add_up, threads, warps = make_norm(kind), jit_device(block_sum), THREADS, WARPS
    top, most, least = TOP, MOST, TOP / MOST

    def kernel(
        functions: HermiteFunctions, l: i64, nprim: i64, operator: OperatorArguments, parts: F64, scales: F64
    ):
        sums, tid, total = cuda.shared.array(threads, f64), i64(cuda.threadIdx.x), 0.0
        for n in range(tid, parts.size, threads):
            total += parts[n]
        total = add_up(total, sums, tid)
        lane, width = tid & 31, functions.words.size
        prim = i64(cuda.blockIdx.x) * warps + (tid >> 5)
        while prim < nprim:
            root, place = norm(functions, prim, l, operator, lane), lane
            while place - lane < width:
                here = min(place, width - 1)
                bound = cuda.shfl_sync(-1, root, functions.words[here] >> 24) * functions.factors[here] * total
                # no number stays no number, here and in what is made of it
                scale = most if bound <= least else top / bound
                if place < width:
                    scales[prim * width + place] = scale
                place += 32
            prim += i64(cuda.gridDim.x) * warps

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
            context.launch(
                Variant(density_norms, (kind,)), BLOCKS, THREADS, 0, functions, degree.l, degree.order.nprim, arguments,
                degree.densities[number], parts.part(n * BLOCKS, (BLOCKS,)),
            )  # fmt: skip
        for degree, functions in given:
            blocks = min(SCALE_BLOCKS, -(-degree.order.nprim // WARPS))
            if blocks:
                context.launch(
                    Variant(hermite_scales, (kind,)), blocks, THREADS, 0, functions, degree.l, degree.order.nprim,
                    arguments, parts, degree.scales[number],
                )  # fmt: skip
