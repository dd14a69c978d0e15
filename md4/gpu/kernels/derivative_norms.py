"""Bounds of derivatives of shell pairs on the GPU: (sum_ab (ab|ab))^1/2 of the largest one, as `md4.cpu.gradient` has.

A block of threads takes one shell pair after the other. In memory of its own it makes H^{A_i} and H^{B_i} of the
primitive pairs (`md4.method.derivatives`), without contraction coefficients. For each two primitive pairs i and k it
makes r in shared memory as `md4.gpu.kernels.recurrence` does for large L. Then a thread takes functions ab and q, and
adds up

    sum_p H_i[ab, p] r[p + q] H_k[ab, q] (-1)^|q|

of all six derivatives, times sum_c c_i c_k of the contracted functions of a and of b. The sums over threads have a
fixed order.
"""

import math
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, i32, i64, jit_device, types, u64
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.unrolled import r_update, store_shared
from md4.gpu.kernels.groups import PairRange, Records, pair_range, primitives_of, records
from md4.gpu.kernels.h_matrices import Components, components, make_e_coefficients, packed_triples
from md4.gpu.kernels.primitive_quartets import OperatorArguments, charge, operator_arguments, separate
from md4.gpu.kernels.recurrence import packed_rules
from md4.gpu.pair_layout import EXPONENTS, RECORD
from md4.gpu.tuning import CHUNK_BYTES, FEWEST_BLOCKS
from md4.method import hermite, operators
from md4.method.angular import nherm, packed_hermite, sum_ordinal
from md4.method.derivatives import axis_derivatives, make_h_derivatives
from md4.shells.schwarz import TOGETHER, larger

# Threads of a block, and most blocks of a launch: pairs differ in their numbers of primitives.
THREADS, BLOCKS = 128, 2 * FEWEST_BLOCKS


class DerivativeFunctions(NamedTuple):
    """The Hermite functions of derivatives, of degree up to l + 1.

    Attributes
    ----------
    packed, triples : int32 array
        `packed_hermite` and `packed_triples`.
    rules : int64 array
        `packed_rules` for r, up to L = 2 (l + 1).
    """

    packed: I32
    triples: I32
    rules: I64


def coefficient_product(numbers, one, two, count):
    """sum_c of the products of `count` contraction coefficients that begin at `one` and at `two` (device function)."""
    total = 0.0
    for c in range(count):
        total += numbers[one + c] * numbers[two + c]
    return total


def six_of(numbers, n):
    """Six numbers from number n on (device function); an unsigned place needs no question whether it is negative."""
    return (
        numbers[u64(n)], numbers[u64(n + 1)], numbers[u64(n + 2)], numbers[u64(n + 3)], numbers[u64(n + 4)],
        numbers[u64(n + 5)],
    )  # fmt: skip


def derivative_norms():
    """Kernel factory; all sizes are run-time numbers."""
    e_coefficients, zero_of = make_e_coefficients(THREADS), operators.zero_function("coulomb", jit_device)
    h_derivatives = jit_device(make_h_derivatives(jit_device(axis_derivatives), hermite.NOISE))
    ordinal, larger_of, charge_at, separation, primitives, product, six = map(
        jit_device, (sum_ordinal, larger, charge, separate, primitives_of, coefficient_product, six_of)
    )
    threads, warps, together = THREADS, THREADS // 32, TOGETHER

    def kernel(
        pairs: Records, ab: PairRange, npair: i64, of_a: Components, of_b: Components, of: DerivativeFunctions,
        operator: OperatorArguments, room: F64, size: i64, out: F64,
    ):  # fmt: skip
        shared, sums = cuda.shared.array(0, types.float64), cuda.shared.array((warps, 6), types.float64)
        tid, numbers = i64(cuda.threadIdx.x), pairs.numbers
        la, lb, nh, nr = of_a.l + 1, of_b.l + 1, of.packed.size, of.rules.size
        nt, l, ncomp_b = la + lb + 1, 2 * (la + lb - 1), of_b.start.size - 1
        count = (of_a.start.size - 1) * ncomp_b * nh
        # in shared memory are R and 0, 1, ..., then [0]^(m), then r^(m) and r^(m+1); or E
        zeros, first_r = l + 4, 2 * l + 5
        known = shared_address(shared)
        even, odd = known + 8 * first_r, known + 8 * (first_r + nr)
        own, pair = size * i64(cuda.blockIdx.x), i64(cuda.blockIdx.x)
        while pair < npair:
            (begin, end), norm = primitives(ab, pair), 0.0
            while begin < end:
                many = min(end - begin, together)
                for i in range(many):
                    record, n = (begin + i) * pairs.width, tid
                    e_coefficients(pairs, record, la, lb, shared)
                    two_a, two_b = 2 * numbers[record + EXPONENTS], 2 * numbers[record + EXPONENTS + 1]
                    while n < count:
                        row = quotient(n, nh)
                        a = quotient(row, ncomp_b)
                        b, t = row - a * ncomp_b, of.triples[n - row * nh]
                        h = h_derivatives(
                            of_a.start[a], of_a.start[a + 1], of_a.powers, of_a.weights, of_b.start[b],
                            of_b.start[b + 1], of_b.powers, of_b.weights, t & 255, (t >> 8) & 255, t >> 16, lb, nt,
                            (la + 1) * (lb + 1) * nt, shared, two_a, two_b,
                        )  # fmt: skip
                        at = own + (i * count + n) * 6
                        room[at], room[at + 1], room[at + 2], room[at + 3], room[at + 4], room[at + 5] = h
                        n += threads
                    cuda.syncthreads()
                sa, sb, sc, sd, se, sf = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                for i in range(many):
                    for k in range(i + 1):
                        one, two = (begin + i) * pairs.width, (begin + k) * pairs.width
                        s = separation(charge_at(numbers, one), charge_at(numbers, two))
                        if tid == 0:
                            shared[0], shared[1], shared[2] = s.rz, s.ry, s.rx
                        if tid <= l:
                            shared[3 + tid] = float(tid)
                            shared[zeros + tid] = zero_of(tid, s.p, s.q, s.r2, operator.parameter, operator.table)
                        cuda.syncthreads()
                        old, new, reach = odd, even, 0
                        for m in range(l, -1, -1):
                            reach += (l - m + 1) * (l - m + 2) // 2  # triples of degree up to l - m
                            n = tid
                            if tid == 0:
                                store_shared(i32(new), shared[zeros + m])
                                n += threads
                            while n < reach:
                                store_shared(i32(new + 8 * n), r_update(of.rules[n], i32(old), i32(known)))
                                n += threads
                            cuda.syncthreads()
                            old, new = new, old
                        weight = 1.0 if i == k else 2.0
                        weight *= product(numbers, one + RECORD, two + RECORD, of_a.nctr)
                        weight *= product(numbers, one + RECORD + of_a.nctr, two + RECORD + of_a.nctr, of_b.nctr)
                        n = tid
                        while n < count:
                            row = quotient(n, nh)
                            q, at = of.packed[n - row * nh], own + (i * count + row * nh) * 6
                            ta, tb, tc, td, te, tf = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                            of_p = 0
                            for degree in range(l // 2 + 1):
                                for rest in range(degree + 1):  # p = (degree - rest, rest - z, z)
                                    t = first_r + ordinal(of_p + (rest << 16) + (degree << 24), q)
                                    for _ in range(rest + 1):
                                        value, h = shared[u64(t)], six(room, at)
                                        ta, tb, tc = ta + h[0] * value, tb + h[1] * value, tc + h[2] * value
                                        td, te, tf = td + h[3] * value, te + h[4] * value, tf + h[5] * value
                                        t, at = t + 1, at + 6
                                    of_p += rest + 1
                            h, factor = six(room, own + (k * count + n) * 6), -weight if (q >> 24) & 1 else weight
                            sa, sb, sc = sa + factor * ta * h[0], sb + factor * tb * h[1], sc + factor * tc * h[2]
                            sd, se, sf = sd + factor * td * h[3], se + factor * te * h[4], sf + factor * tf * h[5]
                            n += threads
                        cuda.syncthreads()
                other = 16
                while other > 0:
                    sa += cuda.shfl_xor_sync(-1, sa, other)
                    sb += cuda.shfl_xor_sync(-1, sb, other)
                    sc += cuda.shfl_xor_sync(-1, sc, other)
                    sd += cuda.shfl_xor_sync(-1, sd, other)
                    se += cuda.shfl_xor_sync(-1, se, other)
                    sf += cuda.shfl_xor_sync(-1, sf, other)
                    other >>= 1
                if tid & 31 == 0:
                    w = tid >> 5
                    sums[w, 0], sums[w, 1], sums[w, 2], sums[w, 3], sums[w, 4], sums[w, 5] = sa, sb, sc, sd, se, sf
                cuda.syncthreads()
                if tid < 6:
                    total = 0.0
                    for w in range(warps):
                        total += sums[w, tid]
                    norm += math.sqrt(0.0 if total < 0.0 else total)  # NaN stays
                cuda.syncthreads()
                begin += many
            if tid < 6:
                sums[0, tid] = norm
            cuda.syncthreads()
            if tid == 0:
                for n in range(1, 6):
                    norm = larger_of(norm, sums[0, n])
                out[pair] = norm
            cuda.syncthreads()
            pair += cuda.gridDim.x

    return Kernel(kernel, (threads, 3))


# launcher


def launch_derivative_norms(context, side, out):
    """Bounds of (sum_ab (ab|ab))^1/2 of the largest derivative of each pair of a list into `out`, shape (npair,).

    Parameters
    ----------
    side : md4.engine.PreparedPairs
    out : Buffer
    """
    facts, functions = side.facts, nherm(side.facts.l + 1)
    la, lb, rows = facts.la, facts.lb, facts.nab // (facts.nctr_a * facts.nctr_b)
    order = 2 * (facts.l + 1)
    size = 6 * rows * functions * min(facts.max_prim, TOGETHER)
    blocks = min(len(side), BLOCKS, max(1, context.pool.share(CHUNK_BYTES) // (8 * max(1, size))))
    shared = max(3 * hermite.axis_size(la + 1, lb + 1), 2 * order + 5 + 2 * nherm(order))
    tables = (packed_hermite, facts.l + 1), (packed_triples, facts.l + 1), (packed_rules, order)
    context.launch(
        Variant(derivative_norms, ()), blocks, THREADS, 8 * shared, records(side), pair_range(side), len(side),
        components(context, la, facts.pure, facts.nctr_a), components(context, lb, facts.pure, facts.nctr_b),
        tuple(context.table(*table) for table in tables), operator_arguments(context, "coulomb", 0.0),
        context.pool.room("derivatives", max(1, blocks * size)), size, out,
    )  # fmt: skip
