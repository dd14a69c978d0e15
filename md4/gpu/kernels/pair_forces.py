"""Step 3 of gradients: dE/dA_i = sum_{ab,p} H^{A_i}[ab, p] Z[ab, p] of each primitive pair, and likewise for B.

A block of threads takes a primitive pair. As in `md4.gpu.kernels.h_matrices` it makes the E coefficients of the three
axes in shared memory, of one power more of a and of b. Then each thread adds up elements of H^A and H^B, made where
they are needed, times Z (`md4.gpu.kernels.reverse_sums`). Z has the sign (-1)^|p| still to come, since bra and ket
have changed places for U. The sums over threads have a fixed order.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, i64, jit_device, types
from md4.gpu.kernels.groups import Records
from md4.gpu.kernels.h_matrices import Components, components, make_e_coefficients, packed_triples
from md4.gpu.kernels.reverse_sums import ReverseSums
from md4.gpu.pair_layout import EXPONENTS, RECORD
from md4.gpu.staircases import hermite_order, whole_rows
from md4.method import hermite
from md4.method.derivatives import axis_derivatives, make_h_derivatives

THREADS = 128


class Functions(NamedTuple):
    """The functions ab of pairs and the Hermite functions p of derivatives that take part.

    Attributes
    ----------
    rows : int32 array
        `md4.gpu.staircases.whole_rows`.
    order, triples : int32 array
        Ordinals of p in the order of Z, -1 for padding, and `packed_triples` by ordinal.
    """

    rows: I32
    order: I32
    triples: I32


def pair_forces():
    """Kernel factory; all sizes are run-time numbers."""
    e_coefficients = make_e_coefficients(THREADS)
    h_derivatives = jit_device(make_h_derivatives(jit_device(axis_derivatives), hermite.NOISE))
    threads, warps = THREADS, THREADS // 32

    def kernel(pairs: Records, of_a: Components, of_b: Components, functions: Functions, z: ReverseSums, parts: i64,
        more: types.boolean, out: F64,
    ):  # fmt: skip
        e, sums = cuda.shared.array(0, types.float64), cuda.shared.array((warps, 6), types.float64)
        tid, prim = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        record, la, lb = (z.first_prim + prim) * pairs.width, of_a.l + 1, of_b.l + 1
        nt = la + lb + 1
        size = (la + 1) * (lb + 1) * nt
        e_coefficients(pairs, record, la, lb, e)
        two_a, two_b = 2 * pairs.numbers[record + EXPONENTS], 2 * pairs.numbers[record + EXPONENTS + 1]
        ncomp_a, ncomp_b = of_a.start.size - 1, of_b.start.size - 1
        nb = of_b.nctr * ncomp_b
        count = functions.rows.size * 8
        block_size, step = z.rows * 8, z.nprim * functions.order.size * z.rows
        az, ay, ax, bz, by, bx = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        n = tid
        while n < count * (functions.order.size // 8):
            block, element = n // count, n % count
            p = functions.order[8 * block + (element & 7)]
            if p >= 0:
                place, value = (prim * (functions.order.size // 8) + block) * block_size + element, 0.0
                for _ in range(parts):
                    value += z.numbers[place]
                    place += step
                row, t = functions.rows[element >> 3], functions.triples[p]
                a, b = row // nb, row % nb
                ca, ma, cb, mb = a // ncomp_a, a % ncomp_a, b // ncomp_b, b % ncomp_b
                pz, py, px = t & 255, (t >> 8) & 255, t >> 16
                value *= pairs.numbers[record + RECORD + ca] * pairs.numbers[record + RECORD + of_a.nctr + cb]
                if (pz + py + px) & 1:
                    value = -value
                h = h_derivatives(
                    of_a.start[ma], of_a.start[ma + 1], of_a.powers, of_a.weights, of_b.start[mb], of_b.start[mb + 1],
                    of_b.powers, of_b.weights, pz, py, px, lb, nt, size, e, two_a, two_b,
                )  # fmt: skip
                az += h[0] * value
                ay += h[1] * value
                ax += h[2] * value
                bz += h[3] * value
                by += h[4] * value
                bx += h[5] * value
            n += threads
        other = 16
        while other > 0:
            az += cuda.shfl_xor_sync(-1, az, other)
            ay += cuda.shfl_xor_sync(-1, ay, other)
            ax += cuda.shfl_xor_sync(-1, ax, other)
            bz += cuda.shfl_xor_sync(-1, bz, other)
            by += cuda.shfl_xor_sync(-1, by, other)
            bx += cuda.shfl_xor_sync(-1, bx, other)
            other >>= 1
        if tid & 31 == 0:
            own = tid >> 5
            sums[own, 0], sums[own, 1], sums[own, 2] = ax, ay, az
            sums[own, 3], sums[own, 4], sums[own, 5] = bx, by, bz
        cuda.syncthreads()
        if tid < 6:
            total, place = 0.0, tid * z.nprim + prim
            for own in range(warps):
                total += sums[own, tid]
            out[place] = out[place] + total if more else total

    return Kernel(kernel, (threads, 4))


# launcher


def launch_forces(context, ab, p, z, parts, out, more=False):
    """Derivatives by x, y and z of A and of B of the primitive pairs of a task, (6, nprim) into `out`, or added to it.

    Parameters
    ----------
    ab : md4.engine.PreparedPairs
        The list of the bra pairs, with the functions that take part.
    p : ListFacts
        The Hermite functions of derivatives.
    z, parts
        Fields of `ReverseSums`, and the number of parts.
    more : bool
        Whether they are added.
    """
    if z[2] == 0:  # pairs without primitive pairs, which have no derivatives
        return
    facts, data = ab.facts, ab.data
    functions = (
        context.table(whole_rows, facts.h_class), context.table(hermite_order, p.l, p.first, p.mirror),
        context.table(packed_triples, p.l),
    )  # fmt: skip
    context.launch(
        Variant(pair_forces, ()), z[2], THREADS, 24 * hermite.axis_size(facts.la + 1, facts.lb + 1),
        (data.records, data.width), components(context, facts.la, facts.pure, facts.nctr_a),
        components(context, facts.lb, facts.pure, facts.nctr_b), functions, z, parts, more, out,
    )  # fmt: skip
