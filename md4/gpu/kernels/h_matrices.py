"""Step 1 on the GPU: the H matrices of all primitive pairs of a list, in one of the forms of `md4.gpu.h_layout`.

The H of one primitive pair is made by one block of threads, or by several if there are few pairs: E coefficients of the
three axes in shared memory, then element by element.
"""


import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, jit_device, types
from md4.gpu.h_layout import form_positions, form_size
from md4.gpu.staircases import class_of
from md4.gpu.tuning import H_BLOCKS, H_THREADS
from md4.method import hermite
from md4.method.angular import hermite_triples

# Doubles of a primitive pair's record: p, P, P - A, P - B, then the coefficients of a and of b.
RECORD = 10


def packed_triples(l):
    """Hermite triples as i + 2^8 j + 2^16 k, int32."""
    t = hermite_triples(l)
    return (t[:, 0] + (t[:, 1] << 8) + (t[:, 2] << 16)).astype(np.int32)


def h_matrices():
    """Kernel factory; all sizes are run-time numbers."""
    e_coefficient, h_element = jit_device(hermite.e_coefficient), jit_device(hermite.h_element)

    def kernel(
        records, width, la, lb, nctr_a, nctr_b, start_a, powers_a, weights_a, start_b, powers_b, weights_b, triples,
        positions, sign, places, stride, parts, out,
    ):  # fmt: skip
        e = cuda.shared.array(0, types.float64)
        tid, prim = cuda.threadIdx.x, types.int64(cuda.blockIdx.x) // parts
        record = prim * width
        nt = la + lb + 1
        size = (la + 1) * (lb + 1) * nt
        for i in range(la + 1):
            for j in range(lb + 1):
                if tid < 3 * nt:
                    axis, t = tid // nt, tid % nt
                    xpa, xpb = records[record + 4 + axis], records[record + 7 + axis]
                    e[axis * size + (i * (lb + 1) + j) * nt + t] = e_coefficient(
                        i, j, t, lb, nt, 0.5 / records[record], xpa, xpb, e, axis * size
                    )
                cuda.syncthreads()
        ncomp_a, ncomp_b = start_a.size - 1, start_b.size - 1
        nb, target = nctr_b * ncomp_b, prim * positions.size if stride == 1 else places[prim]
        n = types.int64(cuda.blockIdx.x) % parts * H_THREADS + tid
        while n < positions.size:
            value, position = 0.0, positions[n]
            if position >= 0:
                row, t = position & 65535, triples[position >> 16]
                a, b = row // nb, row % nb
                ca, ma, cb, mb = a // ncomp_a, a % ncomp_a, b // ncomp_b, b % ncomp_b
                px, py, pz = t & 255, (t >> 8) & 255, t >> 16
                value = h_element(
                    start_a[ma], start_a[ma + 1], powers_a, weights_a, start_b[mb], start_b[mb + 1], powers_b,
                    weights_b, px, py, pz, lb, nt, size, e,
                )  # fmt: skip
                value *= records[record + RECORD + ca] * records[record + RECORD + nctr_a + cb]
                if sign and (px + py + pz) & 1:
                    value = -value
            out[target + n * stride] = value
            n += parts * H_THREADS

    i64 = types.int64
    tables = (I32, I32, F64)
    return Kernel(kernel, signature=(F64, *[i64] * 5, *tables, *tables, I32, I32, i64, I64, i64, i64, F64))


# launcher


def h_variant():
    """The one variant."""
    return Variant(h_matrices, ())


def component_tables(context, l, pure):
    """`md4.method.hermite.component_table` on the device."""
    return [context.table(component_part, l, pure, n) for n in range(3)]


def component_part(l, pure, n):
    return hermite.component_table(l, pure)[n]


def launch_h(context, pairs, records, form, places, stride, out):
    """H of all primitive pairs in a form: element n of a pair next to n - 1, or from `places` on, `stride` apart."""
    if pairs.nprim == 0:
        return
    size = form_size(pairs, form)
    parts = max(1, min(H_BLOCKS // pairs.nprim, size // (4 * H_THREADS)))
    context.launch(
        h_variant(), pairs.nprim * parts, H_THREADS, 24 * hermite.axis_size(pairs.la, pairs.lb),
        records, RECORD + pairs.nctr_a + pairs.nctr_b, pairs.la, pairs.lb, pairs.nctr_a, pairs.nctr_b,
        *component_tables(context, pairs.la, pairs.pure), *component_tables(context, pairs.lb, pairs.pure),
        context.table(packed_triples, pairs.l),
        context.table(form_positions, form, class_of(pairs)),
        int(form.sign), places, stride, parts, out,
    )  # fmt: skip
