"""Step 1 on the GPU: the H matrices of all primitive pairs of a list, in one of the forms of `md4.gpu.h_layout`.

A block of threads makes the H of one primitive pair, or several blocks do where there are few pairs: first the E
coefficients of the three axes, in shared memory, then one element after the other. Rows of derivatives need E of one
power more of a and of b.
"""

from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F32, F64, I32, I64, cuda, i64, jit_device, types
from md4.gpu.emit.scalars import round_to_tf32
from md4.gpu.h_layout import form_positions, form_size, row_bits
from md4.gpu.kernels.groups import Records
from md4.gpu.pair_layout import EXPONENTS, FROM_A, FROM_B, RECORD
from md4.method import derivatives, hermite
from md4.method.angular import hermite_triples

# Threads of a block. With fewer primitive pairs than FEW several blocks share the H of one, to fill the device.
THREADS, FEW = 128, 4096


class Components(NamedTuple):
    """A shell of either side of the pairs: its angular components in terms of monomials, and its l.

    Attributes
    ----------
    start, powers, weights : arrays
        See `md4.method.hermite.component_table`.
    l, nctr : int64
        Angular momentum, and contracted functions.
    """

    start: I32
    powers: I32
    weights: F64
    l: i64
    nctr: i64


class Positions(NamedTuple):
    """Where the elements of H go.

    Attributes
    ----------
    element : int32 array
        Row and Hermite function of each position, see `md4.gpu.h_layout.form_positions`.
    triples : int32 array
        `packed_triples`.
    sign : int64
        Whether elements carry (-1)^|p|.
    places : int64 array
        First position of each primitive pair, unless `stride` is 1, where they follow each other.
    stride : int64
        From one position to the next.
    row_bits : int64
        Bits of `element` that are the row.
    derivative : int64
        The derivative of the first block of rows, see `md4.method.derivatives`; 0 of pairs themselves.
    """

    element: I32
    triples: I32
    sign: i64
    places: I64
    stride: i64
    row_bits: i64
    derivative: i64


def packed_triples(l):
    """Hermite triples (i, j, k) as i + 2^8 j + 2^16 k, int32."""
    t = hermite_triples(l)
    return (t[:, 0] + (t[:, 1] << 8) + (t[:, 2] << 16)).astype(np.int32)


def make_element(derived):
    """Device function: an element of H, of row `row` and Hermite function (pz, py, px), without coefficients.

    If `derived`, of its `derivative`. `e` are the E coefficients, with `lb`, `nt` and `size` as in `h_element`.
    """
    plain, one = jit_device(hermite.h_element), jit_device(derivatives.one_derivative)
    axis = jit_device(derivatives.axis_derivatives)
    every = jit_device(derivatives.make_h_derivatives(axis, hermite.NOISE))

    def element(of_a, a, of_b, b, pz, py, px, lb, nt, size, e, derivative, two_a, two_b):
        return plain(
            of_a.start[a], of_a.start[a + 1], of_a.powers, of_a.weights, of_b.start[b], of_b.start[b + 1], of_b.powers,
            of_b.weights, pz, py, px, lb, nt, size, e,
        )  # fmt: skip

    def derived_element(of_a, a, of_b, b, pz, py, px, lb, nt, size, e, derivative, two_a, two_b):
        found = every(
            of_a.start[a], of_a.start[a + 1], of_a.powers, of_a.weights, of_b.start[b], of_b.start[b + 1], of_b.powers,
            of_b.weights, pz, py, px, lb, nt, size, e, two_a, two_b,
        )  # fmt: skip
        return one(found, derivative)

    return jit_device(derived_element if derived else element)


def make_e_coefficients(threads):
    """Device function (pairs, record, la, lb, e): so many threads make E of the three axes of a primitive pair.

    Its record begins at `record`. Powers reach `la` and `lb`; E is in shared memory, see `md4.method.hermite`.
    """
    e_coefficient = jit_device(hermite.e_coefficient)

    def e_coefficients(pairs, record, la, lb, e):
        nt = la + lb + 1
        size = (la + 1) * (lb + 1) * nt
        for i in range(la + 1):
            for j in range(lb + 1):
                n = i64(cuda.threadIdx.x)
                while n < 3 * nt:
                    axis, t = n // nt, n % nt
                    from_a, from_b = pairs.numbers[record + FROM_A + axis], pairs.numbers[record + FROM_B + axis]
                    e[axis * size + (i * (lb + 1) + j) * nt + t] = e_coefficient(
                        i, j, t, lb, nt, 0.5 / pairs.numbers[record], from_a, from_b, e, axis * size
                    )
                    n += threads
                cuda.syncthreads()

    return jit_device(e_coefficients)


def h_matrices(single=False, derived=False, rounded=False):
    """Kernel factory; all sizes are run-time numbers.

    `single`: elements are floats, `rounded` to TF32 or not. `derived`: rows of derivatives.
    """
    e_coefficients, element_of, up = make_e_coefficients(THREADS), make_element(derived), int(derived)
    threads, numbers = THREADS, F32 if single else F64

    def kernel(pairs: Records, of_a: Components, of_b: Components, positions: Positions, parts: i64, out: numbers):
        e = cuda.shared.array(0, types.float64)
        tid, prim = cuda.threadIdx.x, i64(cuda.blockIdx.x) // parts
        record, la, lb = prim * pairs.width, of_a.l + up, of_b.l + up
        nt = la + lb + 1
        size = (la + 1) * (lb + 1) * nt
        e_coefficients(pairs, record, la, lb, e)
        ncomp_a, ncomp_b, count = of_a.start.size - 1, of_b.start.size - 1, positions.element.size
        nb = of_b.nctr * ncomp_b
        nab, two_a, two_b = of_a.nctr * ncomp_a * nb, 0.0, 0.0
        if derived:
            two_a, two_b = 2 * pairs.numbers[record + EXPONENTS], 2 * pairs.numbers[record + EXPONENTS + 1]
        target = prim * count if positions.stride == 1 else positions.places[prim]
        n = i64(cuda.blockIdx.x) % parts * threads + tid
        while n < count:
            value, element = 0.0, positions.element[n]
            if element >= 0:
                row = element & ((i64(1) << positions.row_bits) - 1)
                t = positions.triples[element >> positions.row_bits]
                derivative = positions.derivative
                if derived:
                    derivative, row = derivative + row // nab, row % nab
                a, b = row // nb, row % nb
                ca, ma, cb, mb = a // ncomp_a, a % ncomp_a, b // ncomp_b, b % ncomp_b
                pz, py, px = t & 255, (t >> 8) & 255, t >> 16
                value = element_of(of_a, ma, of_b, mb, pz, py, px, lb, nt, size, e, derivative, two_a, two_b)
                value *= pairs.numbers[record + RECORD + ca] * pairs.numbers[record + RECORD + of_a.nctr + cb]
                if positions.sign and (pz + py + px) & 1:
                    value = -value
            out[target + n * positions.stride] = round_to_tf32(value) if rounded else value
            n += parts * threads

    return Kernel(kernel)


# launcher


def components(context, l, pure, nctr):
    """`Components` of a shell."""
    return Components(*(context.table(component_part, l, pure, n) for n in range(3)), l, nctr)


def component_part(l, pure, n):
    """One of the three arrays of `md4.method.hermite.component_table`."""
    return hermite.component_table(l, pure)[n]


def e_bytes(pairs):
    """Bytes of the E coefficients of a primitive pair of a list."""
    up = bool(pairs.derivatives)
    return 24 * hermite.axis_size(pairs.la + up, pairs.lb + up)


def launch_h(context, pairs, nprim, records, form, places, stride, out):
    """H of all primitive pairs in a form: element n of a pair next to n - 1, or from `places` on, `stride` apart.

    `pairs` are the `ListFacts` of the list, or of a part of it, which has so many primitive pairs.
    """
    if nprim == 0:
        return
    size = form_size(pairs, form)
    parts = max(1, min(FEW // nprim, size // (4 * THREADS)))
    element, triples = context.table(form_positions, form, pairs.h_class), context.table(packed_triples, pairs.l)
    derived = bool(pairs.derivatives)
    facts = (form.single, derived, True) if form.rounded else (form.single, True) if derived else (True,)
    variant = Variant(h_matrices, facts if form.single or derived else ())
    context.launch(
        variant, nprim * parts, THREADS, e_bytes(pairs),
        Records(records, RECORD + pairs.nctr_a + pairs.nctr_b), components(context, pairs.la, pairs.pure, pairs.nctr_a),
        components(context, pairs.lb, pairs.pure, pairs.nctr_b),
        Positions(
            element, triples, int(form.sign), places, stride, row_bits(pairs.l), pairs.derivatives[0] if derived else 0
        ), parts, out,
    )  # fmt: skip
