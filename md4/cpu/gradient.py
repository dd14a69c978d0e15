"""Gradients on the CPU by reverse mode: LANES ket pairs side by side, summed up for each bra pair.

For E = 1/2 sum_s [ j_s D_ab D_cd - k_s D_ac D_bd ] (ab|cd), a sum over some matrices D, let

    Gamma[ab, cd] = f_ab f_cd sum_s [ j_s D_ab D_cd - k_s/2 (D_ac D_bd + D_ad D_bc) ]

with f_ab = 1 if a and b are the same shell, else 2.
With H^{A_i} of `md4.method.derivatives`, and all ket pairs of each bra pair,

    1.  U[cd, p] = sum_q H[cd, q] [p|q],     |p| <= l_ab + 1         step 4 with the sides exchanged
    2.  Z[ab, p] = sum_cd Gamma[ab, cd] U[cd, p]                     summed over all kets of a bra pair
    3.  dE/dA_i = sum_{ab,p} H^{A_i}[ab, p] Z[ab, p]                 once a primitive bra pair, likewise for B

are the derivatives by the centres of the bra. Those of the ket follow when the lists have changed roles, and the factor
2 of these is in Gamma. So no integral of a derivative is made, and no sum depends on the order in which threads work.

Without exchange Gamma is a product, and U is made of one row only, the density of the ket in the Hermite basis: with
D_q = sum_cd f_cd D_cd H[cd, q] in place of H, steps 1 and 2 are those of J alone (`md4.method.hermite_coulomb`).
"""

from collections import namedtuple
from functools import cache

import numpy as np

from md4.cpu.compile import Loop, bound, helper, part
from md4.cpu.digestion import gather
from md4.cpu.emit.recurrence import cube_side, recur
from md4.cpu.emit.vectors import (
    LANES,
    broadcast,
    doubles,
    fma,
    halves,
    integers,
    load,
    make_tile,
    multiply,
    negative,
    store,
    subtract,
    total,
)
from md4.cpu.emit.zeros import zeros_of
from md4.cpu.groups import BLOCK, FIELD, PRIMITIVE, aligned_empty, every_reach, hermite_functions, numbered
from md4.cpu.h_matrices import h_loop, multiply_row
from md4.cpu.integrals import cube_places, lane_products, side_of_cube
from md4.shells.schwarz import TOGETHER
from md4.support.locks import once

# Of a list, in the order of its groups: addresses of its shells, of bounds of its pairs, and of the largest bound, the
# sum and the sum of squares of the bounds of each group and those behind it.
KET = numbered("Ket", "shells bounds highest sums squares")
# Bytes of U that are made together where each ket pair has one primitive pair.
U_BYTES = 256 << 10
# Rows of derivatives that are multiplied together for their norms.
NORM_ROWS = 32
zeros_of_lanes = None  # set by `reverse_sums` and `derivative_norms`, for one operator


class Workspace(namedtuple("Workspace", "zeros axis r u gamma densities column_p of_q of_cd numbers z")):
    """Memory of one thread: arrays of vectors, but for the places `column_p`, `of_q` and `of_cd`, and 0, 1, 2, ..."""

    __slots__ = ()


def workspace(memory, l, most_u, most_gamma, widest, most_z, elements):
    """`Workspace` for a highest order of r, and numbers of vectors of U, Gamma, blocks of D and Z, of elements of H."""
    vectors = (l + 1, 3 * (l + 1) ** 2, cube_side(l) ** 3, most_u, most_gamma, 5 * widest**2)
    arrays = [memory.empty((n * LANES,), aligned_empty) for n in vectors]
    places = [np.empty(n, dtype=np.int32) for n in (most_u, elements)]
    places += [np.empty(max(most_u, most_gamma), dtype=np.int64)]  # of U, which may be long
    places += [np.arange(max(most_u, most_gamma))]
    for array in places:
        memory.watch(array)
    return Workspace(*arrays, *places, memory.empty((most_z * LANES,), aligned_empty))


def workspace_bytes(l, most_u, most_gamma, widest, most_z, elements):
    """Bytes of a `workspace`."""
    vectors = l + 1 + 3 * (l + 1) ** 2 + cube_side(l) ** 3 + most_u + most_gamma + 5 * widest**2 + most_z
    return 8 * LANES * vectors + 4 * (most_u + elements) + 16 * max(most_u, most_gamma)


@part
def gamma_of_bra(terms, places, sizes, gamma):
    """Gamma of a bra pair with ket pairs whose H is already multiplied by the density."""
    densities, coulomb = terms[0], terms[1]
    (a0, b0), (na, nb) = places, sizes
    factor = coulomb[0] if a0 == b0 else 2 * coulomb[0]
    for a in range(na):
        for b in range(nb):
            store(gamma, (a * nb + b) * LANES, broadcast(factor * densities[0, a0 + a, b0 + b]))


@part
def make_gamma(terms, places, first_c, first_d, sizes_ab, sizes_cd, weights, work):
    """Gamma of a bra pair, whose first AOs are `places`, with the ket pairs in lanes, whose `weights` are f_cd."""
    densities, coulomb, exchange = terms[0], terms[1], terms[2]
    (a0, b0), (na, nb), (nc, nd), gamma, room = places, sizes_ab, sizes_cd, work.gamma, work.densities
    size = len(room) // 5
    d_ac, d_ad, d_bc, d_bd, d_cd = (
        room[:size], room[size : 2 * size], room[2 * size : 3 * size], room[3 * size : 4 * size], room[4 * size :],
    )  # fmt: skip
    weight = multiply(broadcast(1.0 if a0 == b0 else 2.0), load(weights, 0))
    gamma[: na * nb * nc * nd * LANES] = 0.0
    for s in range(len(densities)):
        density, at = densities[s], 0
        with_j, with_k = coulomb[s] != 0.0, exchange[s] != 0.0
        if with_j:
            for lane in range(LANES):
                for c in range(nc):
                    for d in range(nd):
                        d_cd[(c * nd + d) * LANES + lane] = density[first_c[lane] + c, first_d[lane] + d]
        if with_k:
            gather(density, a0, na, first_c, nc, LANES, 1, d_ac)
            gather(density, a0, na, first_d, nd, LANES, 1, d_ad)
            gather(density, b0, nb, first_c, nc, LANES, 1, d_bc)
            gather(density, b0, nb, first_d, nd, LANES, 1, d_bd)
        of_k = multiply(broadcast(-0.5 * exchange[s]), weight)
        for a in range(na):
            for b in range(nb):
                of_j = multiply(broadcast(coulomb[s] * density[a0 + a, b0 + b]), weight)
                for c in range(nc):
                    ac, bc = broadcast(0.0), broadcast(0.0)
                    if with_k:
                        ac = multiply(of_k, load(d_ac, (a * nc + c) * LANES))
                        bc = multiply(of_k, load(d_bc, (b * nc + c) * LANES))
                    for d in range(nd):
                        value = load(gamma, at)
                        if with_j:
                            value = fma(of_j, load(d_cd, (c * nd + d) * LANES), value)
                        if with_k:
                            value = fma(ac, load(d_bd, (b * nd + d) * LANES), value)
                            value = fma(bc, load(d_ad, (a * nd + d) * LANES), value)
                        store(gamma, at, value)
                        at += LANES


tile8, tile4, tile1 = (make_tile(2, width, True) for width in (8, 4, 1))


@helper
def gamma_products(gamma, ncd, of_cd, u, first, last, tiles, z, place, step_ab, numbers):
    """Z[ab][p] += sum_cd Gamma[ab, cd] U[cd, p] for first <= p < last, in the tiles of `z_tiles`."""
    rows, begins, functions, places = tiles
    step, zero = np.int64(LANES), np.int64(0)
    for tile in range(len(begins) - 1):
        row, other, c, end = rows[tile, 0], rows[tile, 1], begins[tile], begins[tile + 1]
        h, below = row * ncd, (other - row) * ncd
        while c < end and functions[c] < first:
            c += 1
        while end > c and functions[end - 1] >= last:
            end -= 1
        while c < end:
            if end - c >= 8:
                tile8(
                    gamma, h, of_cd, zero, ncd, below, u, places, c, z, place, numbers, row, other, step_ab, functions,
                    step, True,
                )  # fmt: skip
                c += 8
            elif end - c >= 4:
                tile4(
                    gamma, h, of_cd, zero, ncd, below, u, places, c, z, place, numbers, row, other, step_ab, functions,
                    step, True,
                )  # fmt: skip
                c += 4
            else:
                tile1(
                    gamma, h, of_cd, zero, ncd, below, u, places, c, z, place, numbers, row, other, step_ab, functions,
                    step, True,
                )  # fmt: skip
                c += 1


class Tiles(namedtuple("Tiles", "rows begins functions places")):
    """The elements of Z that H of the derivatives needs, by tiles of two rows ab.

    Attributes
    ----------
    rows : ndarray of int64, shape (ntile, 2)
        Twice the same row where one is left.
    begins : ndarray of int64, shape (ntile + 1,)
        Where the functions of each tile begin.
    functions, places : ndarray of int32
        Hermite functions p, in ascending order, and p LANES.
    """

    __slots__ = ()


@cache
def z_tiles(la, lb, pure, nctr_a, nctr_b, single, derivatives):
    """The `Tiles` of a class of pairs."""
    needed = every_reach(la, lb, pure, single, derivatives).any(axis=0)
    needed = needed[..., hermite_functions(la, lb, pure, single, derivatives)[0]]
    na, nb, count = needed.shape
    flat = np.broadcast_to(needed[None, :, None], (nctr_a, na, nctr_b, nb, count)).reshape(-1, count)
    sequence = np.lexsort(flat.T[::-1])
    rows = np.stack([sequence[::2], np.append(sequence, sequence[-1])[1 : len(sequence) + 1 : 2]], axis=1)
    tiles = flat[rows].any(axis=1)
    begins, functions = np.concatenate([[0], np.cumsum(tiles.sum(axis=1))]), np.nonzero(tiles)[1].astype(np.int32)
    return Tiles(np.ascontiguousarray(rows), begins, functions, functions * np.int32(LANES))


def add_to_z(bra, ket, primitives, vectors, l, count, tiles, parameter, table, work):
    """Steps 1 and 2 for a bra pair and a group of ket pairs; Z[i][ab][p] of all bra primitives is added to."""
    nab, ncd, nq, n_cd = bra[FIELD.nab], ket[FIELD.nab], ket[FIELD.nherm], ket[FIELD.elements]
    (i0, i1), (k0, k1) = primitives, vectors
    side, blocks = side_of_cube(l), (nq + BLOCK - 1) // BLOCK
    rows, sequence = halves(ket[FIELD.rows], blocks * ncd + 1), integers(ket[FIELD.sequence], ncd)
    bra_data, ket_data = doubles(bra[FIELD.primitives], 1), doubles(ket[FIELD.lane_primitives], 1)
    h_cd, zero, step = doubles(ket[FIELD.lane_h], 1), np.int64(0), np.int64(LANES)
    width = count if k1 - k0 > 1 else min(count, max(8, U_BYTES // (8 * LANES * ncd) // 8 * 8))
    for i in range(i0, i1):
        at_p = i * PRIMITIVE.size
        for k in range(k0, k1):
            at_q = k * PRIMITIVE.size * LANES
            rz = subtract(broadcast(bra_data[at_p + 1]), load(ket_data, at_q + LANES))
            ry = subtract(broadcast(bra_data[at_p + 2]), load(ket_data, at_q + 2 * LANES))
            rx = subtract(broadcast(bra_data[at_p + 3]), load(ket_data, at_q + 3 * LANES))
            r2 = fma(rz, rz, fma(ry, ry, multiply(rx, rx)))
            zeros_of_lanes(
                l, broadcast(bra_data[at_p]), load(ket_data, at_q), r2, parameter, table, work.axis, work.zeros
            )
            recur(l, side, work.zeros, rz, ry, rx, work.axis, work.r)
            for first in range(0, count, width):
                columns = min(width, count - first)
                for block in range(blocks):
                    lane_products(
                        h_cd, k * n_cd, work.of_q, rows[block * ncd :], ncd, columns, work.r, work.column_p[first:],
                        work.u, zero, sequence, width * step, work.numbers, step, k > k0 or block > 0,
                    )  # fmt: skip
                if k == k1 - 1:
                    for cd in range(ncd):
                        work.of_cd[cd] = (cd * width - first) * LANES
                    gamma_products(
                        work.gamma, ncd, work.of_cd, work.u, first, first + columns, tiles, work.z,
                        (i - i0) * nab * count * step, count * step, work.numbers,
                    )  # fmt: skip


@part
def set_places(ket, count, triples, side, work):
    """Where the factors of each element of H of a ket list lie in the cube r, and each p of derivatives of the bra."""
    cube_places(ket, side, work.of_cd)
    q_of = halves(ket[FIELD.columns], 1)
    for n in range(ket[FIELD.elements]):
        work.of_q[n] = work.of_cd[q_of[n]]
    for p in range(count):
        work.column_p[p] = ((triples[3 * p] * side + triples[3 * p + 1]) * side + triples[3 * p + 2]) * LANES


@part
def look_at_lanes(ket, shells, bounds, g, a, b, terms, weights, first_c, first_d):
    """Sets f_cd and the first AOs of c and d of each lane of a group; the sum of the bounds, of their squares, and the
    largest, but for that of the bra pair, whose shells are a and b.

    A lane without a pair has the weight 0, and repeats the last pair.
    """
    densities, coulomb, exchange, norms, _ = terms
    order, aos, width = integers(ket[FIELD.order], 1), integers(ket[FIELD.aos], 1), ket[FIELD.width]
    first, of_sum, of_squares, largest = g * (LANES // width), 0.0, 0.0, 0.0
    count = min(LANES // width, ket[FIELD.npair] - first)
    for lane in range(LANES):
        m = first + min(lane // width, count - 1)
        cd = order[m]
        first_c[lane], first_d[lane] = aos[2 * cd], aos[2 * cd + 1]
        weights[lane] = 0.0
        if lane < count * width:
            weights[lane] = 1.0 if first_c[lane] == first_d[lane] else 2.0
            if lane % width == 0:
                c, d, size = shells[2 * cd], shells[2 * cd + 1], 0.0
                for s in range(len(densities)):
                    norm = norms[s]
                    size += abs(coulomb[s]) * norm[a, b] * norm[c, d]
                    size += 0.5 * abs(exchange[s]) * (norm[a, c] * norm[b, d] + norm[a, d] * norm[b, c])
                size *= bounds[m]
                of_sum, of_squares, largest = of_sum + size, of_squares + size * size, max(largest, size)
    return of_sum, of_squares, largest, count


@part
def most_beside(terms, a, b):
    """The largest factor of a bound that the densities give any ket pair beside shells a and b."""
    densities, coulomb, exchange, norms, highest = terms
    most = 0.0
    for s in range(len(densities)):
        largest = 0.0
        for c in range(highest.shape[1]):
            largest = max(largest, highest[s, c])
        most += abs(coulomb[s]) * norms[s, a, b] * largest + abs(exchange[s]) * highest[s, a] * highest[s, b]
    return most


def reverse_lanes(
    number, first, last, lists, kets, these, bra_bound, triples, tiles, tolerance, parameter, table, terms, work, sums,
    left_out,
):  # fmt: skip
    """Z of the bra pairs `first` to `last` of a list, summed over all ket pairs of all lists.

    Parameters
    ----------
    number : int
        Of the bra list.
    lists, kets : ndarray of int64, shapes (nlist, FIELD.size) and (nlist, KET.size)
    these : ndarray of int64
        The numbers of the ket lists.
    bra_bound : ndarray, shape (npair,)
        Bounds of derivatives of the bra pairs, in the order of their groups.
    triples : ndarray of int64, shape (3 n,)
        The Hermite functions p of derivatives.
    tiles : Tiles
        Of the class of the bra.
    tolerance : float
        A group of ket pairs is left out if the bounds of all its quartets are smaller.
    terms : tuple of ndarray
        D, j and k, shapes (n, nao, nao), (n,) and (n,), with |D_ab| and the largest of each row, (n, nshell, nshell)
        and (n, nshell). Ket lists without functions d have the D_q of the first D as their one row of H.
    work : Workspace
    sums : ndarray
        Z[vector of primitive pairs][ab][p][lane], the primitive pairs in the order of the bra pairs.
    left_out : ndarray, shape (2,)
        The bounds and the squares of the bounds of quartets that are left out are added to this.

    Returns
    -------
    int
        Number of quartets.
    """
    bra, count, slot, quartets = lists[number], len(triples) // 3, 0, 0
    sizes, nab = (bra[FIELD.na], bra[FIELD.nb]), bra[FIELD.nab]
    order, start = integers(bra[FIELD.order], 1), integers(bra[FIELD.start], 1)
    aos, shells = integers(bra[FIELD.aos], 1), integers(kets[number, KET.shells], 1)
    weights, first_c, first_d = np.empty(LANES), np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    for n in range(first, last):
        ab, extent = order[n], bra_bound[n]
        primitives, places = (start[ab], start[ab + 1]), (aos[2 * ab], aos[2 * ab + 1])
        size = (primitives[1] - primitives[0]) * nab * count
        a, b = shells[2 * ab], shells[2 * ab + 1]
        work.z[: size * LANES] = 0.0
        most = extent * most_beside(terms, a, b)
        for this in these:
            ket, ready = lists[this], False
            bounds, reached = doubles(kets[this, KET.bounds], 1), doubles(kets[this, KET.highest], 1)
            of_sums, of_squares = doubles(kets[this, KET.sums], 1), doubles(kets[this, KET.squares], 1)
            shells_cd, vectors = integers(kets[this, KET.shells], 1), integers(ket[FIELD.vectors], 1)
            l = bra[FIELD.l] + 1 + ket[FIELD.l]
            for g in range(ket[FIELD.ngroup]):
                if most * reached[g] < tolerance:
                    left_out[0] += most * of_sums[g]
                    left_out[1] += most * most * of_squares[g]
                    break
                of_sum, of_square, largest, here = look_at_lanes(
                    ket, shells_cd, bounds, g, a, b, terms, weights, first_c, first_d
                )
                if extent * largest < tolerance or size == 0 or vectors[g] == vectors[g + 1]:
                    left_out[0] += extent * of_sum
                    left_out[1] += extent * extent * of_square
                    continue
                if not ready:
                    set_places(ket, count, triples, side_of_cube(l), work)
                    ready = True
                if ket[FIELD.nb] > 0:
                    make_gamma(terms, places, first_c, first_d, sizes, (ket[FIELD.na], ket[FIELD.nb]), weights, work)
                else:
                    gamma_of_bra(terms, places, sizes, work.gamma)
                add_to_z(bra, ket, primitives, (vectors[g], vectors[g + 1]), l, count, tiles, parameter, table, work)
                quartets += here
        for row in range(size):
            at = (slot // LANES * nab * count + row % (nab * count)) * LANES + slot % LANES
            sums[at] = total(load(work.z, row * LANES))
            if row % (nab * count) == nab * count - 1:
                slot += 1
    return quartets


@once
def reverse_sums(kind):
    """`reverse_lanes` for one operator."""
    add = bound(add_to_z, make=part, zeros_of_lanes=zeros_of(kind))
    return Loop(reverse_lanes, f"reverse_{kind}", allocates=True, add_to_z=add)


def add_squares(ket, pair, functions, triples, parameter, table, abq, work, squares):
    """Adds (ab|ab) of the primitive pairs i and k of each lane, both ways, to those of their derivatives."""
    nab, l, nq, elements = ket[FIELD.nab], 2 * ket[FIELD.l], ket[FIELD.nherm], ket[FIELD.elements]
    side, blocks = side_of_cube(l), (nq + BLOCK - 1) // BLOCK
    rows, sequence = halves(ket[FIELD.rows], blocks * nab + 1), integers(ket[FIELD.sequence], nab)
    data, h = doubles(ket[FIELD.lane_primitives], 1), doubles(ket[FIELD.lane_h], 1)
    columns, zero, step, (i, k) = halves(ket[FIELD.columns], 1), np.int64(0), np.int64(LANES), pair
    at_p, at_q = i * PRIMITIVE.size * LANES, k * PRIMITIVE.size * LANES
    # Q - P, since both sides have the sign of a ket; see `md4.cpu.integrals.add_signs`
    rz = subtract(load(data, at_q + LANES), load(data, at_p + LANES))
    ry = subtract(load(data, at_q + 2 * LANES), load(data, at_p + 2 * LANES))
    rx = subtract(load(data, at_q + 3 * LANES), load(data, at_p + 3 * LANES))
    r2 = fma(rz, rz, fma(ry, ry, multiply(rx, rx)))
    zeros_of_lanes(l, load(data, at_p), load(data, at_q), r2, parameter, table, work.axis, work.zeros)
    recur(l, side, work.zeros, rz, ry, rx, work.axis, work.r)
    twice = broadcast(1.0 if i == k else 2.0)
    for head in range(0, nab, NORM_ROWS):
        count = min(NORM_ROWS, nab - head)
        for block in range(blocks):
            lane_products(
                h, i * elements, work.of_q, rows[block * nab + head :], count, nq, work.r, work.column_p, abq, zero,
                work.numbers, nq * step, work.numbers, step, block > 0,
            )  # fmt: skip
        for row in range(count):
            derivative = sequence[head + row] // functions
            value = load(squares, derivative * LANES)
            for block in range(blocks):
                for e in range(rows[block * nab + head + row], rows[block * nab + head + row + 1]):
                    q = columns[e]
                    term = multiply(load(h, (k * elements + e) * LANES), load(abq, (row * nq + q) * LANES))
                    if (triples[3 * q] + triples[3 * q + 1] + triples[3 * q + 2]) % 2 == 1:
                        term = negative(term)
                    value = fma(twice, term, value)
            store(squares, derivative * LANES, value)


def norms_lanes(lists, first, last, functions, triples, parameter, table, abq, work, out):
    """Bounds of (sum_ab (ab|ab))^1/2 of each derivative of the pairs of some groups, to out[group, derivative, lane].

    Each pair has one lane. The rows of the list are those of one derivative after the other, and `functions` those of
    one of them. Of pairs with many primitive pairs it is the sum of the norms of TOGETHER of these, which is not less.
    """
    ket = lists[0]
    columns, vectors = halves(ket[FIELD.columns], 1), integers(ket[FIELD.vectors], 1)
    cube_places(ket, side_of_cube(2 * ket[FIELD.l]), work.column_p)
    for e in range(ket[FIELD.elements]):
        work.of_q[e] = work.column_p[columns[e]]
    count = out.shape[1]
    squares = np.empty(count * LANES)
    for g in range(first, last):
        out[g] = 0.0
        for begin in range(vectors[g], vectors[g + 1], TOGETHER):
            squares[:] = 0.0
            for i in range(begin, min(begin + TOGETHER, vectors[g + 1])):
                for k in range(begin, i + 1):
                    add_squares(ket, (i, k), functions, triples, parameter, table, abq, work, squares)
            for derivative in range(count):
                for lane in range(LANES):
                    out[g, derivative, lane] += np.sqrt(max(0.0, squares[derivative * LANES + lane]))


@once
def derivative_norms(kind):
    """`norms_lanes` for one operator."""
    add = bound(add_squares, make=part, zeros_of_lanes=zeros_of(kind))
    return Loop(norms_lanes, f"norms_{kind}", allocates=True, add_squares=add)


# Step 3: forces of vectors of primitive pairs from their Z; see `h_loop`.
forces = once(lambda: Loop(h_loop, "forces", take_row=multiply_row))
