"""Gradients on the CPU by reverse mode: LANES ket pairs side by side, summed up for each bra pair.

For E = 1/2 sum_s [ j_s D_ab D_cd - k_s D_ac D_bd ] (ab|cd), a sum over some matrices D, let

    Gamma[ab, cd] = f_ab f_cd sum_s [ j_s D_ab D_cd - k_s/2 (D_ac D_bd + D_ad D_bc) ],   f_ab = 1 if a and b are the same
                                                                                         shell, else 2.
With H^{A_i} of `md4.method.derivatives`, and all ket pairs of each bra pair,

    1.  U[cd, p] = sum_q H[cd, q] [p|q],     |p| <= l_ab + 1         step 4 with the sides exchanged
    2.  Z[ab, p] = sum_cd Gamma[ab, cd] U[cd, p]                     summed over all kets of a bra pair
    3.  dE/dA_i = sum_{ab,p} H^{A_i}[ab, p] Z[ab, p]                 once a primitive bra pair, likewise for B

are the derivatives by the centres of the bra. Those of the ket follow when the lists have changed roles, and the factor
2 of these is in Gamma. So no integral of a derivative is made, and no sum depends on the order in which threads work.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from md4.cpu.compile import Loop, bound, helper, part
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
from md4.support.locks import once

# Of a list, in the order of its groups: addresses of its shells, of bounds of its pairs, and of the largest bound, the
# sum and the sum of squares of the bounds of each group and those behind it.
KET = numbered("Ket", "shells bounds highest sums squares")
# Bytes of U that are made together where each ket pair has one primitive pair.
U_BYTES = 256 << 10
# Rows of derivatives that are multiplied together for their norms.
NORM_ROWS = 32
zeros_of_lanes = None  # set by `reverse_sums` and `derivative_norms`, for one operator


class Workspace(NamedTuple):
    """Memory of one thread, without that for Z; arrays of vectors but for the places and numbers."""

    zeros: np.ndarray
    axis: np.ndarray
    r: np.ndarray
    u: np.ndarray
    gamma: np.ndarray
    densities: np.ndarray
    column_p: np.ndarray
    of_q: np.ndarray
    of_cd: np.ndarray
    numbers: np.ndarray
    z: np.ndarray


def workspace(memory, l, most_u, most_gamma, widest, most_z, elements):
    """`Workspace` for a highest order of r, and numbers of vectors of U, Gamma, blocks of D and Z, of elements of H."""
    vectors = (l + 1, 3 * (l + 1) ** 2, cube_side(l) ** 3, most_u, most_gamma, 5 * widest**2)
    arrays = [aligned_empty((n * LANES,)) for n in vectors]
    places = [np.empty(n, dtype=np.int32) for n in (most_u, elements, most_gamma)]
    made = Workspace(*arrays, *places, np.arange(max(most_u, most_gamma)), aligned_empty((most_z * LANES,)))
    for array in made:
        memory.watch(array)
    return made


@helper
def gather(matrix, row, rows, columns, count, out):
    """out[r][n][lane] = matrix[row + r, columns[lane] + n]."""
    for r in range(rows):
        for lane in range(LANES):
            for n in range(count):
                out[(r * count + n) * LANES + lane] = matrix[row + r, columns[lane] + n]


@part
def make_gamma(densities, coulomb, exchange, a0, b0, first_c, first_d, sizes, weights, room, gamma):
    """Gamma of a bra pair with the ket pairs in lanes, whose `weights` are f_ab f_cd."""
    na, nb, nc, nd = sizes
    size = len(room) // 5
    d_ac, d_ad, d_bc, d_bd, d_cd = (
        room[:size], room[size : 2 * size], room[2 * size : 3 * size], room[3 * size : 4 * size], room[4 * size :],
    )  # fmt: skip
    weight = load(weights, 0)
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
            gather(density, a0, na, first_c, nc, d_ac)
            gather(density, a0, na, first_d, nd, d_ad)
            gather(density, b0, nb, first_c, nc, d_bc)
            gather(density, b0, nb, first_d, nd, d_bd)
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


class Tiles(NamedTuple):
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

    rows: np.ndarray
    begins: np.ndarray
    functions: np.ndarray
    places: np.ndarray


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


def reverse_lanes(
    number, first, last, lists, kets, these, bra_bound, triples, tiles, tolerance, parameter, table, densities, coulomb, exchange,
    norms, highest, work, sums, left_out,
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
    densities, coulomb, exchange : ndarray, shapes (n, nao, nao), (n,) and (n,)
        D, j and k.
    norms, highest : ndarray, shapes (n, nshell, nshell) and (n, nshell)
        |D_ab|, and the largest of each row.
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
    na, nb, nab = bra[FIELD.na], bra[FIELD.nb], bra[FIELD.nab]
    order, start = integers(bra[FIELD.order], 1), integers(bra[FIELD.start], 1)
    aos_ab, shells_ab = integers(bra[FIELD.aos], 1), integers(kets[number, KET.shells], 1)
    weights, first_c, first_d = np.empty(LANES), np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    for n in range(first, last):
        ab, extent = order[n], bra_bound[n]
        i0, i1 = start[ab], start[ab + 1]
        work.z[: (i1 - i0) * nab * count * LANES] = 0.0
        a0, b0, shell_a, shell_b = aos_ab[2 * ab], aos_ab[2 * ab + 1], shells_ab[2 * ab], shells_ab[2 * ab + 1]
        beside = 0.0
        for s in range(len(densities)):
            beside += abs(coulomb[s]) * norms[s, shell_a, shell_b] * highest[s].max()
            beside += abs(exchange[s]) * highest[s, shell_a] * highest[s, shell_b]
        for this in these:
            ket, shells = lists[this], integers(kets[this, KET.shells], 1)
            bounds, reached = doubles(kets[this, KET.bounds], 1), doubles(kets[this, KET.highest], 1)
            vectors, order_cd = integers(ket[FIELD.vectors], 1), integers(ket[FIELD.order], 1)
            aos, nc, nd, width = integers(ket[FIELD.aos], 1), ket[FIELD.na], ket[FIELD.nb], ket[FIELD.width]
            l, per_group, ready = bra[FIELD.l] + 1 + ket[FIELD.l], LANES // width, False
            for g in range(ket[FIELD.ngroup]):
                most = extent * beside
                if most * reached[g] < tolerance:
                    left_out[0] += most * doubles(kets[this, KET.sums], 1)[g]
                    left_out[1] += most * most * doubles(kets[this, KET.squares], 1)[g]
                    break
                here = min(per_group, ket[FIELD.npair] - g * per_group)
                largest, of_sum, of_squares = 0.0, 0.0, 0.0
                for lane in range(LANES):
                    m = g * per_group + min(lane // width, here - 1)
                    cd = order_cd[m]
                    first_c[lane], first_d[lane] = aos[2 * cd], aos[2 * cd + 1]
                    weights[lane] = 0.0
                    if lane < here * width:
                        weights[lane] = (1.0 if a0 == b0 else 2.0) * (1.0 if aos[2 * cd] == aos[2 * cd + 1] else 2.0)
                        if lane % width == 0:
                            c, d, size = shells[2 * cd], shells[2 * cd + 1], 0.0
                            for s in range(len(densities)):
                                size += abs(coulomb[s]) * norms[s, shell_a, shell_b] * norms[s, c, d]
                                one, two = norms[s, shell_a, c] * norms[s, shell_b, d], norms[s, shell_a, d] * norms[s, shell_b, c]
                                size += 0.5 * abs(exchange[s]) * (one + two)
                            size *= extent * bounds[m]
                            largest, of_sum, of_squares = max(largest, size), of_sum + size, of_squares + size * size
                if largest < tolerance or i0 == i1 or vectors[g] == vectors[g + 1]:
                    left_out[0] += of_sum
                    left_out[1] += of_squares
                    continue
                if not ready:
                    cube_places(ket, side_of_cube(l), work.of_cd)
                    q_of = halves(ket[FIELD.columns], 1)
                    for e in range(ket[FIELD.elements]):
                        work.of_q[e] = work.of_cd[q_of[e]]
                    side = side_of_cube(l)
                    for p in range(count):
                        work.column_p[p] = (
                            (triples[3 * p] * side + triples[3 * p + 1]) * side + triples[3 * p + 2]
                        ) * LANES
                    ready = True
                make_gamma(
                    densities, coulomb, exchange, a0, b0, first_c, first_d, (na, nb, nc, nd), weights, work.densities,
                    work.gamma,
                )  # fmt: skip
                add_to_z(bra, ket, (i0, i1), (vectors[g], vectors[g + 1]), l, count, tiles, parameter, table, work)
                quartets += here
        for i in range(i1 - i0):
            at = slot // LANES * nab * count * LANES + slot % LANES
            for row in range(nab * count):
                sums[at + row * LANES] = total(load(work.z, (i * nab * count + row) * LANES))
            slot += 1
    return quartets


@once
def reverse_sums(kind):
    """`reverse_lanes` for one operator."""
    add = bound(add_to_z, make=part, zeros_of_lanes=zeros_of(kind))
    return Loop(reverse_lanes, f"reverse_{kind}", allocates=True, add_to_z=add)


def norms_lanes(lists, first, last, functions, triples, parameter, table, abq, work, out):
    """sum_ab (ab|ab) of each derivative of the pairs in groups `first` to `last`, to out[group, derivative, lane].

    Each pair has one lane. The rows of the list are those of one derivative after the other, and `functions` those of
    one of them.
    """
    ket, nab = lists[0], lists[0, FIELD.nab]
    l, nq, elements = 2 * ket[FIELD.l], ket[FIELD.nherm], ket[FIELD.elements]
    side, blocks = side_of_cube(l), (nq + BLOCK - 1) // BLOCK
    rows, sequence = halves(ket[FIELD.rows], blocks * nab + 1), integers(ket[FIELD.sequence], nab)
    vectors, data, h = integers(ket[FIELD.vectors], 1), doubles(ket[FIELD.lane_primitives], 1), doubles(ket[FIELD.lane_h], 1)
    columns, zero, step = halves(ket[FIELD.columns], 1), np.int64(0), np.int64(LANES)
    cube_places(ket, side, work.column_p)
    for e in range(elements):
        work.of_q[e] = work.column_p[columns[e]]
    for g in range(first, last):
        for block in range(out.shape[1]):
            store(out[g, block], 0, broadcast(0.0))
        for i in range(vectors[g], vectors[g + 1]):
            for k in range(vectors[g], i + 1):
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
                            h, i * elements, work.of_q, rows[block * nab + head :], count, nq, work.r, work.column_p,
                            abq, zero, work.numbers, nq * step, work.numbers, step, block > 0,
                        )  # fmt: skip
                    for row in range(count):
                        this = out[g, sequence[head + row] // functions]
                        value = load(this, 0)
                        for block in range(blocks):
                            for e in range(rows[block * nab + head + row], rows[block * nab + head + row + 1]):
                                q = columns[e]
                                term = multiply(load(h, (k * elements + e) * LANES), load(abq, (row * nq + q) * LANES))
                                if (triples[3 * q] + triples[3 * q + 1] + triples[3 * q + 2]) % 2 == 1:
                                    term = negative(term)
                                value = fma(twice, term, value)
                        store(this, 0, value)


@once
def derivative_norms(kind):
    """`norms_lanes` for one operator."""
    return Loop(norms_lanes, f"norms_{kind}", zeros_of_lanes=zeros_of(kind))


# Step 3: forces of vectors of primitive pairs from their Z; see `h_loop`.
forces = once(lambda: Loop(h_loop, "forces", take_row=multiply_row))
