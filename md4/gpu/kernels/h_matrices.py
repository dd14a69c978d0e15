"""Step 1 on the GPU: H matrices, in the order in which the kernels read them.

Forms of the H of a primitive pair, each a table of (row, p) by position, zero-padded:

    'bra', 'ket'     left operand: [p block of 8][fragment of 16 rows][p half][lane][row half]
    'right'          right operand: [p block of 8][row block of 8][8 rows][8 p]
    'bra stairs'     'bra', rows and p in the order of `md4.gpu.staircases`
    'bra turned', 'ket turned'  'right', likewise
    'ket flat'       'ket', p in that order, rows as they are
    'weight'         [row][p] as it is
    'row', 'column'  the elements that do not vanish by symmetry, by row (bra) or by p (ket); 'column' runs over the
                     slots of primitive pairs fastest, see `md4.gpu.kernels.thread_quartet`

Those of a ket ('ket', 'ket ...', 'right', 'weight', 'column') carry the sign (-1)^|q|. The H of one primitive pair is
made by one block of threads, or by several if there are few pairs: E coefficients of the three axes in shared memory,
then element by element.
"""

from functools import cache

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, jit_device, types
from md4.gpu.staircases import gather_order, hermite_order, row_table
from md4.gpu.tuning import H_BLOCKS, H_THREADS, blocks_of_8, panel_rows, turned_panel_rows
from md4.method import hermite
from md4.method.angular import hermite_triples, nherm

# Doubles of a primitive pair's record: p, P, P - A, P - B, then the coefficients of a and of b.
RECORD = 10


def packed_triples(l):
    """Hermite triples as i + 2^8 j + 2^16 k, int32."""
    t = hermite_triples(l)
    return (t[:, 0] + (t[:, 1] << 8) + (t[:, 2] << 16)).astype(np.int32)


def panel_row(n):
    """Row within its fragment of 16 of element n of a left operand (device function)."""
    return ((n >> 3) & 7) + 8 * (n & 1)


def panel_inner(n):
    """Inner index within its block of 8 of element n of a left operand (device function)."""
    return 2 * ((n >> 1) & 3) + ((n >> 6) & 1)


def form_size(pairs, form):
    """Doubles of the H of one primitive pair in a form."""
    if form in ("row", "column"):
        return (len(pair_structure(pairs)) + 1) // 2 * 2
    if form == "weight":
        return pairs.nab * pairs.nherm
    return blocks_of_8(pairs.nherm) * form_rows(pairs.nab, form) * 64


def pair_structure(pairs):
    """`md4.method.hermite.structure` of a list's class."""
    return hermite.structure(pairs.la, pairs.lb, pairs.pure, pairs.nctr_a, pairs.nctr_b)


def form_rows(nab, form):
    """Blocks of 8 rows of an operand's form."""
    if form == "right":
        return blocks_of_8(nab)
    return turned_panel_rows(nab) if form.endswith("turned") else panel_rows(nab)


@cache
def form_positions(form, la, lb, pure, nctr_a, nctr_b, nab):
    """Shape (form_size,), int32: row + 2^16 p of every position, -1 where the form is padded."""
    nh = nherm(la + lb)
    if form in ("row", "column"):
        elements = list(hermite.structure(la, lb, pure, nctr_a, nctr_b))
        elements.sort(key=lambda e: e if form == "row" else e[::-1])
        rows, p = np.array(elements + [(-1, -1)] * (len(elements) % 2)).T
    elif form == "weight":
        rows, p = np.divmod(np.arange(nab * nh), nh)
    else:
        rows8 = form_rows(nab, form)
        n = np.arange(blocks_of_8(nh) * rows8 * 64)
        if form == "right" or form.endswith("turned"):
            rows, p = (n >> 6) % rows8 * 8 + ((n >> 3) & 7), (n >> 6) // rows8 * 8 + (n & 7)
        else:
            rows, p = (n >> 7) % (rows8 // 2) * 16 + panel_row(n), (n >> 7) // (rows8 // 2) * 8 + panel_inner(n)
        if form not in ("bra", "ket", "right"):
            p = (gather_order(la + lb) if form.startswith("bra") else hermite_order(la + lb))[p]
        if form.endswith(("stairs", "turned")):
            rows = row_table((la, lb, pure, nctr_a, nctr_b), rows8)[rows]
    padding = (rows < 0) | (rows >= nab) | (p < 0) | (p >= nh)
    return np.where(padding, -1, rows + (p << 16)).astype(np.int32)


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
        context.table(form_positions, form, pairs.la, pairs.lb, pairs.pure, pairs.nctr_a, pairs.nctr_b, pairs.nab),
        int(not form.startswith(("bra", "row"))), places, stride, parts, out,
    )  # fmt: skip
