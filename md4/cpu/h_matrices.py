"""Step 1 on the CPU: H matrices without their zeros by symmetry, of LANES primitive pairs side by side.

They are made in both forms that steps 4 and 5 need: by primitive pair, as numbers for all lanes, and in the lanes of
the groups of a list, where they include the sign (-1)^|q| of a ket.
"""

from collections import namedtuple
from functools import cache
from typing import NamedTuple

import numpy as np

from md4.cpu.compile import Loop, helper, part
from md4.cpu.emit.vectors import (
    LANES,
    broadcast,
    divide,
    doubles,
    fma,
    integers,
    lane_doubles,
    load,
    magnitude,
    multiply,
    noise_removed,
    store,
    view,
)
from md4.cpu.groups import aligned_empty, h_elements, h_structure, hermite_functions, hermite_ordinals
from md4.cpu.threads import in_parts
from md4.method.angular import cartesian_triples, component_coefficients, nherm
from md4.method.hermite import NOISE
from md4.method.hermite_coulomb import signs
from md4.support.locks import once


class HMatrices(NamedTuple):
    """H of a list: `flat`, shape (nprim, elements), and `lanes`, shape (nvector, elements, LANES)."""

    flat: np.ndarray
    lanes: np.ndarray

    @property
    def nbytes(self):
        """Bytes of both."""
        return self.flat.nbytes + self.lanes.nbytes


# Vectors of elements for which a further thread is worth waking.
THREAD_ELEMENTS = 20_000
VECTOR_BYTES = 8 * LANES
# The name of the form in which H matrices are kept: there is only one.
BOTH = "flat and lanes"

FIELDS = "powers_a powers_b pure_a pure_b derivatives nherm ordinals places rows columns functions count signs"


class Shape(namedtuple("Shape", FIELDS)):
    """What the loop of step 1 must know of a class of pairs; arrays of int64 unless said otherwise.

    Attributes
    ----------
    powers_a, powers_b : ndarray, shape (ncart, 3)
        Powers of z, y and x of the monomials of a and b.
    pure_a, pure_b : ndarray of float64, shape (ncart, ncomp)
        Their coefficients in each component.
    derivatives : ndarray, shape (nblock,)
        The derivative of each block of rows; 0 for the one block of rows of H itself.
    nherm : int
        Number of Hermite functions.
    ordinals : ndarray, shape (l + 1, l + 1, l + 1)
        Ordinal of each Hermite triple of z, y and x.
    places : ndarray of int64, shape (nab,)
        Where each row ab is among those that are stored.
    rows : ndarray of int32
        As `h_structure` returns them.
    columns, functions : ndarray of int32
        The Hermite function of each element, by its ordinal among all of them, and among those that are reached.
    count : int
        How many are reached.
    signs : ndarray of float64, shape (elements,)
        (-1)^|p| of each element.
    """

    __slots__ = ()


@cache
def shape_of(la, lb, pure, nctr_a, nctr_b, single, derivatives=()):
    """The `Shape` of a class."""
    sequence, rows, of_used = h_structure(la, lb, pure, nctr_a, nctr_b, single, derivatives)
    reached = hermite_functions(la, lb, pure, single, derivatives)[0]
    columns = reached[of_used].astype(np.int32)
    degree = la + lb + bool(derivatives)
    powers = [np.ascontiguousarray(cartesian_triples(l)[:, ::-1]) for l in (la, lb)]
    of_monomials = (component_coefficients(l, pure) for l in (la, lb))
    return Shape(
        *powers, *of_monomials, np.array(derivatives or (0,)), nherm(degree), hermite_ordinals(degree),
        np.argsort(sequence), rows, columns, of_used, len(reached), signs(degree)[columns],
    )  # fmt: skip


@part
def e_coefficients(la, lb, nt, exponent, pa, pb, e):
    """E_t^{ij} of the three axes of LANES primitive pairs; see `md4.method.hermite`. The layout is [axis][i][j][t]."""
    half = divide(broadcast(0.5), load(exponent, 0))
    for axis in range(3):
        x_a, x_b = load(pa, axis * LANES), load(pb, axis * LANES)
        for i in range(la + 1):
            for j in range(lb + 1):
                here = ((axis * (la + 1) + i) * (lb + 1) + j) * nt
                below, x = (here - nt, x_b) if j > 0 else (here - (lb + 1) * nt, x_a)
                for t in range(nt):
                    value = broadcast(0.0)
                    if i + j == 0:
                        if t == 0:
                            value = broadcast(1.0)
                    elif t <= i + j:
                        value = multiply(x, load(e, (below + t) * LANES))
                        if t > 0:
                            value = fma(half, load(e, (below + t - 1) * LANES), value)
                        if t + 1 < nt:
                            value = fma(broadcast(t + 1.0), load(e, (below + t + 1) * LANES), value)
                    store(e, (here + t) * LANES, value)


@helper
def axis_of_derivative(derivative):
    """The place of its axis in Hermite triples (`md4.method.derivatives.axis_of`); -1 of number 0, which has none."""
    return 2 - (derivative - 1) % 3 if derivative > 0 else -1


@part
def derive(derivative, la, lb, nt, exponents, e, out):
    """`out` = E, with that of one axis of a derivative unless its number is 0; see `md4.method.derivatives`.

    `exponents` are za and zb in lanes. E reaches i = la and j = lb; that of a derivative lacks the last i or j.
    """
    for at in range(0, 3 * (la + 1) * (lb + 1) * nt * LANES, LANES):
        store(out, at, load(e, at))
    axis, of_b = axis_of_derivative(derivative), derivative > 3
    last_a, last_b = 0 if axis < 0 else (la + 1 if of_b else la), lb if of_b else lb + 1
    step, twice = nt if of_b else (lb + 1) * nt, multiply(broadcast(2.0), load(exponents, LANES if of_b else 0))
    for i in range(last_a):
        for j in range(last_b):
            here, power = ((axis * (la + 1) + i) * (lb + 1) + j) * nt, j if of_b else i
            for t in range(here, here + nt):
                value = multiply(twice, load(e, (t + step) * LANES))
                if power > 0:
                    value = fma(broadcast(-float(power)), load(e, (t - step) * LANES), value)
                store(out, t * LANES, value)


@part
def add_products(shape, la, lb, nt, derivative, m, e, half, half_sizes):
    """E_z E_y E_x of all monomials a with component m of b: half[a][p].

    `half_sizes` holds the sums of the moduli of the terms. E reaches i = la and j = lb, and is that of a derivative, of
    one degree more along its axis, unless that is 0.
    """
    nh, axis = shape.nherm, axis_of_derivative(derivative)
    up_z, up_y, up_x = (1 if axis == 0 else 0), (1 if axis == 1 else 0), (1 if axis == 2 else 0)
    for at in range(0, len(shape.powers_a) * nh * LANES, LANES):
        store(half, at, broadcast(0.0))
        store(half_sizes, at, broadcast(0.0))
    for b in range(len(shape.powers_b)):
        c = shape.pure_b[b, m]
        if c == 0.0:
            continue
        bz, by, bx = shape.powers_b[b, 0], shape.powers_b[b, 1], shape.powers_b[b, 2]
        for a in range(len(shape.powers_a)):
            az, ay, ax = shape.powers_a[a, 0], shape.powers_a[a, 1], shape.powers_a[a, 2]
            of_z = (az * (lb + 1) + bz) * nt
            of_y = ((la + 1 + ay) * (lb + 1) + by) * nt
            of_x = ((2 * la + 2 + ax) * (lb + 1) + bx) * nt
            for z in range(az + bz + 1 + up_z):
                for y in range(ay + by + 1 + up_y):
                    e_zy = multiply(load(e, (of_z + z) * LANES), load(e, (of_y + y) * LANES))
                    for x in range(ax + bx + 1 + up_x):
                        value = multiply(e_zy, load(e, (of_x + x) * LANES))
                        at = (a * nh + shape.ordinals[z, y, x]) * LANES
                        store(half, at, fma(broadcast(c), value, load(half, at)))
                        store(half_sizes, at, fma(broadcast(abs(c)), magnitude(value), load(half_sizes, at)))


@part
def angular_row(shape, m, half, half_sizes, used, h):
    """H[p] of component m of a, without contraction coefficients; what is rounding noise of a zero is zero.

    `used` has room for the monomials of the component.
    """
    nh, count = shape.nherm, 0
    for a in range(len(shape.powers_a)):
        if shape.pure_a[a, m] != 0.0:
            used[count] = a
            count += 1
    for p in range(nh):
        value, size = broadcast(0.0), broadcast(0.0)
        for n in range(count):
            c, at = shape.pure_a[used[n], m], (used[n] * nh + p) * LANES
            value = fma(broadcast(c), load(half, at), value)
            size = fma(broadcast(abs(c)), load(half_sizes, at), size)
        store(h, p * LANES, noise_removed(value, multiply(broadcast(NOISE), size)))


@part
def store_row(shape, v, block, ab, member, h, factor, one, flat, lanes):
    """Writes a row of H of a vector of primitive pairs in both forms."""
    elements = len(shape.columns)
    row = shape.places[block * (len(shape.places) // len(shape.derivatives)) + ab]
    for segment in range(row, len(shape.rows) - 1, len(shape.places)):
        for n in range(shape.rows[segment], shape.rows[segment + 1]):
            value = multiply(factor, load(h, shape.columns[n] * LANES))
            store(one, 0, value)
            for lane in range(LANES):
                if member[lane] >= 0:
                    flat[member[lane] * elements + n] = one[lane]
            store(lanes, (v * elements + n) * LANES, multiply(broadcast(shape.signs[n]), value))


@part
def multiply_row(shape, v, block, ab, member, h, factor, one, z, forces):
    """Adds a row of H of a derivative times that of Z to the forces; see `md4.cpu.gradient`."""
    nblock = len(shape.derivatives)
    nab = len(shape.places) // nblock
    row, at, total = shape.places[block * nab + ab], (v * nab + ab) * shape.count * LANES, broadcast(0.0)
    for segment in range(row, len(shape.rows) - 1, len(shape.places)):
        for n in range(shape.rows[segment], shape.rows[segment + 1]):
            total = fma(load(h, shape.columns[n] * LANES), load(z, at + shape.functions[n] * LANES), total)
    here = (v * nblock + block) * LANES
    store(forces, here, fma(factor, total, load(forces, here)))


take_row = None  # one of these, set by `Loop`


def h_loop(primitives, members, la, lb, shape, first, last, one, two, room):
    """Step 1 for the vectors `first` to `last` of a list; rows of H and `one` and `two` are given to `take_row`.

    `room` is the address of memory by `room_for`.
    """
    exponent, pa, pb, coef_a, coef_b, exponent_a, exponent_b = primitives
    na, nb, nh = shape.pure_a.shape[1], shape.pure_b.shape[1], shape.nherm
    nctr_a, nctr_b = coef_a.shape[1], coef_b.shape[1]
    up = 1 if shape.derivatives[0] > 0 else 0  # E of derivatives is made of that of one power more
    ia, ib, nt = la + up, lb + up, la + lb + 1 + up
    ncart = len(shape.powers_a)
    size_e, size_half = VECTOR_BYTES * 3 * (ia + 1) * (ib + 1) * nt, VECTOR_BYTES * ncart * nh
    plain_e, e = doubles(room, 1), doubles(room + size_e, 1)
    room += 2 * size_e
    half, half_sizes, h = doubles(room, 1), doubles(room + size_half, 1), doubles(room + 2 * size_half, 1)
    room += 2 * size_half + VECTOR_BYTES * nh
    used = integers(room, 1)
    # of the lanes: the contraction coefficients, the exponents, P - A and P - B
    room += VECTOR_BYTES * ncart
    of_a, of_b = doubles(room, 1), doubles(room + VECTOR_BYTES * nctr_a, 1)
    room += VECTOR_BYTES * (nctr_a + nctr_b)
    from_a, from_b = doubles(room, 1), doubles(room + 3 * VECTOR_BYTES, 1)
    exponents, width, row = doubles(room + 6 * VECTOR_BYTES, 1), lane_doubles(), lane_doubles()
    for v in range(first, last):
        for lane in range(LANES):
            member = members[v, lane]
            k = member if member >= 0 else members[v, 0]
            width[lane], exponents[lane], exponents[LANES + lane] = exponent[k], exponent_a[k], exponent_b[k]
            for axis in range(3):
                from_a[axis * LANES + lane], from_b[axis * LANES + lane] = pa[k, axis], pb[k, axis]
            for n in range(nctr_a):
                of_a[n * LANES + lane] = coef_a[k, n] if member >= 0 else 0.0
            for n in range(nctr_b):
                of_b[n * LANES + lane] = coef_b[k, n]
        e_coefficients(ia, ib, nt, width, from_a, from_b, plain_e)
        for block in range(len(shape.derivatives)):
            derive(shape.derivatives[block], ia, ib, nt, exponents, plain_e, e)
            for mb in range(nb):
                add_products(shape, ia, ib, nt, shape.derivatives[block], mb, e, half, half_sizes)
                for ma in range(na):
                    angular_row(shape, ma, half, half_sizes, used, h)
                    for ca in range(nctr_a):
                        for cb in range(nctr_b):
                            factor = multiply(load(of_a, ca * LANES), load(of_b, cb * LANES))
                            ab = ((ca * na + ma) * nctr_b + cb) * nb + mb
                            take_row(shape, v, block, ab, view(members, v * LANES, LANES), h, factor, row, one, two)


h_matrices = once(lambda: Loop(h_loop, take_row=store_row))


def room_bytes(pairs):
    """Bytes of memory that `h_loop` needs for a list."""
    shape = shape_of(*pairs.shell_class, pairs.single, pairs.derivatives)
    up = int(shape.derivatives[0] > 0)
    of_e = 3 * (pairs.la + up + 1) * (pairs.lb + up + 1) * (pairs.la + pairs.lb + 1 + up)
    ncart = len(shape.powers_a)
    vectors = 2 * of_e + (2 * ncart + 1) * shape.nherm + ncart + pairs.nctr_a + pairs.nctr_b + 8
    return 8 * LANES * vectors


def room_for(pairs, memory):
    """Memory that `h_loop` needs for a list."""
    return memory.empty((room_bytes(pairs) // 8,), aligned_empty)


def h_bytes(pairs, layout):
    """Bytes that `make_h` takes in one thread for the groups of a layout."""
    elements = h_elements(pairs)
    return 8 * elements * (pairs.nprim + LANES * layout.vectors) + room_bytes(pairs)


def pieces(pairs, layout, room):
    """Slices of a list, or single pairs, of which `make_h` takes at most `room` bytes, about."""
    size = max(1, int(min(len(pairs), len(pairs) * max(0, room) / h_bytes(pairs, layout))))
    return [slice(n, min(n + size, len(pairs))) for n in range(0, len(pairs), size)]


def numbers_of(data):
    """What `h_loop` must know of `Primitives`."""
    return data.exponent, data.pa, data.pb, data.coef_a, data.coef_b, data.exponent_a, data.exponent_b


def make_h(pairs, groups, memory):
    """Step 1: `HMatrices` of a list of `ShellPairs`, by as many threads as are worth it."""
    shape, count = shape_of(*pairs.shell_class, pairs.single, pairs.derivatives), len(groups.members)
    elements = len(shape.columns)
    flat = memory.empty((pairs.nprim, elements))
    lanes = memory.empty((count, elements, LANES), aligned_empty)
    arguments = numbers_of(pairs.primitives), groups.members, pairs.la, pairs.lb, shape

    def make(first, last):
        room = room_for(pairs, memory)
        h_matrices()(*arguments, first, last, flat.reshape(-1), lanes.reshape(-1), room.ctypes.data)

    in_parts(count, int(min(count * elements // THREAD_ELEMENTS, memory.room() // room_bytes(pairs))), make)
    return HMatrices(flat, lanes)
