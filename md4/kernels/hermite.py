"""Step 1 on the GPU: H matrices as panels.

A panel is zero-padded [p block of 8][fragment of 16 rows][p half][lane][row half], the order in which a left operand
is read, so that staging is one contiguous copy and a lane's operand is 16 contiguous bytes. One block of threads makes
the panel of one primitive pair: E coefficients of the three axes in shared memory, then element by element.

The fused kernel wants H[cd, q] as a right operand instead: [q block of 8][cd block of 8][8 cd][8 q].
"""

import numpy as np

from md4 import hermite
from md4.angular import hermite_triples
from md4.device import F64, I32, cuda, jit_device, table_on_device, types
from md4.dispatch import Kernel, Variant, launch
from md4.tiles import H_THREADS, blocks_of_8, panel_rows

# Doubles of a primitive pair's record: p, P, P - A, P - B, then the coefficients of a and of b.
RECORD = 10


def pair_records(pairs):
    """Shape (nprim, RECORD + nctr_a + nctr_b): what the kernels need of each primitive pair."""
    columns = [pairs.exponent[:, None], pairs.centre, pairs.pa, pairs.pb, pairs.coef_a, pairs.coef_b]
    return np.concatenate(columns, axis=1)


def packed_triples(l):
    """Hermite triples as x + 2^8 y + 2^16 z, int32."""
    t = hermite_triples(l)
    return (t[:, 0] + (t[:, 1] << 8) + (t[:, 2] << 16)).astype(np.int32)


def panel_row(n):
    """Row within its fragment of 16 of element n of a panel (device function)."""
    return ((n >> 3) & 7) + 8 * (n & 1)


def panel_inner(n):
    """Inner index within its block of 8 of element n of a panel (device function)."""
    return 2 * ((n >> 1) & 3) + ((n >> 6) & 1)


def h_panels():
    """Kernel factory; all sizes are run-time numbers."""
    e_coefficient, h_element = jit_device(hermite.e_coefficient), jit_device(hermite.h_element)
    row_of, inner_of = jit_device(panel_row), jit_device(panel_inner)

    def kernel(
        records, width, la, lb, nctr_b, start_a, powers_a, weights_a, start_b, powers_b, weights_b, triples,
        nab, nrow8, nk8, sign, right, out,
    ):  # fmt: skip
        e = cuda.shared.array(0, types.float64)
        tid, prim = cuda.threadIdx.x, types.int64(cuda.blockIdx.x)
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
        nb = nctr_b * ncomp_b
        nctr_a = nab // (nb * ncomp_a)
        for n in range(tid, nk8 * nrow8 * 64, H_THREADS):
            row, p = (n >> 6) % nrow8 * 8 + ((n >> 3) & 7), (n >> 6) // nrow8 * 8 + (n & 7)
            if not right:
                row, p = (n >> 7) % (nrow8 // 2) * 16 + row_of(n), (n >> 7) // (nrow8 // 2) * 8 + inner_of(n)
            value = 0.0
            if row < nab and p < triples.size:
                a, b = row // nb, row % nb
                ca, ma, cb, mb = a // ncomp_a, a % ncomp_a, b // ncomp_b, b % ncomp_b
                t = triples[p]
                px, py, pz = t & 255, (t >> 8) & 255, t >> 16
                value = h_element(
                    start_a[ma], start_a[ma + 1], powers_a, weights_a, start_b[mb], start_b[mb + 1], powers_b,
                    weights_b, px, py, pz, lb, nt, size, e,
                )  # fmt: skip
                value *= records[record + RECORD + ca] * records[record + RECORD + nctr_a + cb]
                if sign and (px + py + pz) & 1:
                    value = -value
            out[prim * (nk8 * nrow8 * 64) + n] = value

    i64 = types.int64
    tables = (I32, I32, F64)
    return Kernel(kernel, (F64, *[i64] * 4, *tables, *tables, I32, *[i64] * 5, F64))


# launcher


def form_rows(pairs, form):
    """Blocks of 8 rows of a panel: right operands are not padded to fragments of 16."""
    return blocks_of_8(pairs.nab) if form == "right" else panel_rows(pairs.nab)


def panel_size(pairs, form="ket"):
    """Doubles of the panel of one primitive pair."""
    return blocks_of_8(pairs.nherm) * form_rows(pairs, form) * 64


def component_tables(l, pure):
    """`md4.hermite.component_table` on the device."""
    return [table_on_device(component_part, l, pure, n) for n in range(3)]


def component_part(l, pure, n):
    return hermite.component_table(l, pure)[n]


def launch_h_panels(pairs, records, form, out, stream):
    """Panels of all primitive pairs into out: of a 'bra', or of a 'ket' or 'right' ket with (-1)^|q| included."""
    if pairs.nprim == 0:
        return
    width = RECORD + pairs.nctr_a + pairs.nctr_b
    launch(
        Variant(h_panels, ()), pairs.nprim, H_THREADS, stream, 24 * hermite.axis_size(pairs.la, pairs.lb),
        records, width, pairs.la, pairs.lb, pairs.nctr_b,
        *component_tables(pairs.la, pairs.pure), *component_tables(pairs.lb, pairs.pure),
        table_on_device(packed_triples, pairs.l), pairs.nab, form_rows(pairs, form), blocks_of_8(pairs.nherm),
        int(form != "bra"), int(form == "right"), out,
    )  # fmt: skip
