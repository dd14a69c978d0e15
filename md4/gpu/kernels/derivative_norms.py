"""Bounds for gradients on the GPU: (sum_ab (ab|ab))^1/2 of shell pairs and of their largest derivatives.

A block of threads takes one shell pair after the other. In memory of its own it makes H, H^{A_i} and H^{B_i} of the
primitive pairs (`md4.method.derivatives`), without contraction coefficients. For each two primitive pairs i and k it
makes r in shared memory as `md4.gpu.kernels.recurrence` does for large L. Then a thread takes functions ab and q, and
adds up

    sum_p H_i[ab, p] r[p + q] H_k[ab, q] (-1)^|q|

of the pair and of all six derivatives, times sum_c c_i c_k of the contracted functions of a and of b. As in
`md4.contract.screening`, `ROUNDING` times the same sums with the moduli of the coefficients is added, so that
cancellation hides nothing. The sums over threads have a fixed order.
"""

import math
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, i32, i64, jit_device, types, u64
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.unrolled import r_update, store_shared
from md4.gpu.kernels.groups import PairRange, Records, primitives_of, records
from md4.gpu.kernels.h_matrices import Components, components, make_e_coefficients, packed_triples
from md4.gpu.kernels.primitive_quartets import OperatorArguments, charge, operator_arguments, separate
from md4.gpu.kernels.recurrence import packed_rules
from md4.gpu.pair_layout import EXPONENTS, RECORD
from md4.gpu.tuning import CHUNK_BYTES, FEWEST_BLOCKS
from md4.method import hermite, operators
from md4.method.angular import nherm, packed_hermite, sum_ordinal
from md4.method.derivatives import axis_derivatives, make_h_derivatives
from md4.shells.schwarz import ROUNDING, TOGETHER, larger

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


def coefficient_products(numbers, one, two, count):
    """sum_c of the products of `count` contraction coefficients that begin at `one` and at `two`, and that of their
    moduli (device function)."""
    total, moduli = 0.0, 0.0
    for c in range(count):
        term = numbers[one + c] * numbers[two + c]
        total, moduli = total + term, moduli + abs(term)
    return total, moduli


def seven_of(numbers, n):
    """Seven numbers from number n on (device function); an unsigned place needs no question whether it is negative."""
    return (
        numbers[u64(n)], numbers[u64(n + 1)], numbers[u64(n + 2)], numbers[u64(n + 3)], numbers[u64(n + 4)],
        numbers[u64(n + 5)], numbers[u64(n + 6)],
    )  # fmt: skip


def derivative_norms():
    """Kernel factory; all sizes are run-time numbers."""
    e_coefficients, zero_of = make_e_coefficients(THREADS), operators.zero_function("coulomb", jit_device)
    h_derivatives = jit_device(make_h_derivatives(jit_device(axis_derivatives), hermite.NOISE))
    ordinal, larger_of, charge_at, separation, primitives, products, seven, h_element = map(
        jit_device,
        (sum_ordinal, larger, charge, separate, primitives_of, coefficient_products, seven_of, hermite.h_element),
    )
    threads, warps, together, rounding = THREADS, THREADS // 32, TOGETHER, ROUNDING

    def kernel(
        pairs: Records, ab: PairRange, npair: i64, of_a: Components, of_b: Components, of: DerivativeFunctions,
        operator: OperatorArguments, room: F64, size: i64, norms: F64, largest: F64,
    ):  # fmt: skip
        shared, sums = cuda.shared.array(0, types.float64), cuda.shared.array((warps, 9), types.float64)
        tid, numbers = i64(cuda.threadIdx.x), pairs.numbers
        la, lb, nh, nr = of_a.l + 1, of_b.l + 1, of.packed.size, of.rules.size
        nt, l, ncomp_b = la + lb + 1, 2 * (la + lb - 1), of_b.start.size - 1
        size_e, count = (la + 1) * (lb + 1) * nt, (of_a.start.size - 1) * ncomp_b * nh
        # in shared memory are R and 0, 1, ..., then [0]^(m), then r^(m) and r^(m+1); or E
        zeros, first_r = l + 4, 2 * l + 5
        known = shared_address(shared)
        even, odd = known + 8 * first_r, known + 8 * (first_r + nr)
        own, pair = size * i64(cuda.blockIdx.x), i64(cuda.blockIdx.x)
        while pair < npair:
            (begin, end), norm = primitives(ab, pair), 0.0  # of a derivative, or of the pair, in one thread each
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
                        at, pz, py, px = own + (i * count + n) * 7, t & 255, (t >> 8) & 255, t >> 16
                        a0, a1, b0, b1 = of_a.start[a], of_a.start[a + 1], of_b.start[b], of_b.start[b + 1]
                        room[at], room[at + 1], room[at + 2], room[at + 3], room[at + 4], room[at + 5] = h_derivatives(
                            a0, a1, of_a.powers, of_a.weights, b0, b1, of_b.powers, of_b.weights, pz, py, px, lb, nt,
                            size_e, shared, two_a, two_b,
                        )  # fmt: skip
                        room[at + 6] = h_element(
                            a0, a1, of_a.powers, of_a.weights, b0, b1, of_b.powers, of_b.weights, pz, py, px, lb, nt,
                            size_e, shared,
                        )  # fmt: skip
                        n += threads
                    cuda.syncthreads()
                sa, sb, sc, sd, se, sf, sp, moduli, moduli_p = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
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
                        n, twice, record = tid, 1.0 if i == k else 2.0, one + RECORD + of_a.nctr
                        signed_a, moduli_a = products(numbers, one + RECORD, two + RECORD, of_a.nctr)
                        signed_b, moduli_b = products(numbers, record, two + RECORD + of_a.nctr, of_b.nctr)
                        weight, of_moduli = twice * signed_a * signed_b, twice * moduli_a * moduli_b
                        while n < count:
                            row = quotient(n, nh)
                            q, at, of_p = of.packed[n - row * nh], own + (i * count + row * nh) * 7, 0
                            ta, tb, tc, td, te, tf, tp = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                            for degree in range(l // 2 + 1):
                                for rest in range(degree + 1):  # p = (degree - rest, rest - z, z)
                                    t = first_r + ordinal(of_p + (rest << 16) + (degree << 24), q)
                                    for _ in range(rest + 1):
                                        value, h = shared[u64(t)], seven(room, at)
                                        ta, tb, tc = ta + h[0] * value, tb + h[1] * value, tc + h[2] * value
                                        td, te, tf = td + h[3] * value, te + h[4] * value, tf + h[5] * value
                                        tp += h[6] * value
                                        t, at = t + 1, at + 7
                                    of_p += rest + 1
                            h, sign = seven(room, own + (k * count + n) * 7), -1.0 if (q >> 24) & 1 else 1.0
                            ta, tb, tc, td = sign * ta * h[0], sign * tb * h[1], sign * tc * h[2], sign * td * h[3]
                            te, tf, tp = sign * te * h[4], sign * tf * h[5], sign * tp * h[6]
                            sa, sb, sc, sd = sa + weight * ta, sb + weight * tb, sc + weight * tc, sd + weight * td
                            se, sf, sp = se + weight * te, sf + weight * tf, sp + weight * tp
                            moduli += of_moduli * (ta + tb + tc + td + te + tf)
                            moduli_p += of_moduli * tp
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
                    sp += cuda.shfl_xor_sync(-1, sp, other)
                    moduli += cuda.shfl_xor_sync(-1, moduli, other)
                    moduli_p += cuda.shfl_xor_sync(-1, moduli_p, other)
                    other >>= 1
                if tid & 31 == 0:
                    w = tid >> 5
                    sums[w, 0], sums[w, 1], sums[w, 2], sums[w, 3], sums[w, 4], sums[w, 5] = sa, sb, sc, sd, se, sf
                    sums[w, 6], sums[w, 7], sums[w, 8] = sp, moduli, moduli_p
                cuda.syncthreads()
                if tid < 7:
                    total = 0.0
                    for w in range(warps):
                        total += sums[w, tid] + rounding * sums[w, 8 if tid == 6 else 7]
                    norm += math.sqrt(0.0 if total < 0.0 else total)  # NaN stays
                cuda.syncthreads()
                begin += many
            if tid < 6:
                sums[0, tid] = norm
            elif tid == 6:
                norms[pair] = norm
            cuda.syncthreads()
            if tid == 0:
                for n in range(1, 6):
                    norm = larger_of(norm, sums[0, n])
                largest[pair] = norm
            cuda.syncthreads()
            pair += cuda.gridDim.x

    return Kernel(kernel, (threads, 3))


# launcher


def launch_derivative_norms(context, side, start, count, norms, largest):
    """Bounds of (sum_ab (ab|ab))^1/2 of `count` pairs of a list, a `md4.engine.PreparedPairs`, and of the largest
    derivative of each, into two buffers, shape (count,). Pair n has the primitive pairs from start[n] to start[n + 1].
    """
    if count == 0:
        return
    facts, functions = side.facts, nherm(side.facts.l + 1)
    la, lb, rows = facts.la, facts.lb, facts.nab // (facts.nctr_a * facts.nctr_b)
    order = 2 * (facts.l + 1)
    size = 7 * rows * functions * min(facts.max_prim, TOGETHER)
    blocks = min(count, BLOCKS, max(1, context.pool.share(CHUNK_BYTES) // (8 * max(1, size))))
    shared = max(3 * hermite.axis_size(la + 1, lb + 1), 2 * order + 5 + 2 * nherm(order))
    tables = (packed_hermite, facts.l + 1), (packed_triples, facts.l + 1), (packed_rules, order)
    context.launch(
        Variant(derivative_norms, ()), blocks, THREADS, 8 * shared, records(side), (start, 0, 0), count,
        components(context, la, facts.pure, facts.nctr_a), components(context, lb, facts.pure, facts.nctr_b),
        tuple(context.table(*table) for table in tables), operator_arguments(context, "coulomb", 0.0),
        context.pool.room("derivatives", max(1, blocks * size)), size, norms, largest,
    )  # fmt: skip
