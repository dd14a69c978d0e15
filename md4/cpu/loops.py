"""The loops of the CPU backend, which Numba compiles; see `md4.cpu.backend`."""

from functools import cache

import numpy as np
from numba import njit, prange

from md4.cpu.compile import Loop
from md4.method import hermite, operators, recurrence, scatter
from md4.method.angular import component_coefficients, packed_hermite, packed_powers, sum_ordinal
from md4.method.digestion import quartet_weight
from md4.method.hermite import NOISE
from md4.support.locks import once

# Number of ket primitives that go through the recurrence side by side: one vector register of doubles.
LANES = 8


e_coefficient, h_element, r_step = njit(hermite.e_coefficient), njit(hermite.h_element), njit(recurrence.r_step)
is_repeated = njit(scatter.is_repeated)
zeros = place = None  # set by `Loop`, for one operator or one symmetry


@njit
def e_coefficients(la, lb, exponent, pa, pb):
    """E coefficients of the three axes of one primitive pair; layout as in `hermite.e_coefficient`."""
    nt = la + lb + 1
    size = (la + 1) * (lb + 1) * nt
    e = np.empty(3 * size)
    for axis in range(3):
        base = axis * size
        for i in range(la + 1):
            for j in range(lb + 1):
                for t in range(nt):
                    value = e_coefficient(i, j, t, lb, nt, 0.5 / exponent, pa[axis], pb[axis], e, base)
                    e[base + (i * (lb + 1) + j) * nt + t] = value
    return e


@njit
def add_scaled(target, factor, source):
    for i in range(len(source)):
        target[i] += factor * source[i]


@njit
def primitive_h(la, lb, e, powers_a, powers_b, pure_a, pure_b, triples, ket):
    """H[ma, mb, p] of one primitive pair.

    It is made for Cartesian monomials first, which `pure_b` and `pure_a` transform to components of b and a.
    """
    nh, nt = len(triples), la + lb + 1
    size = (la + 1) * (lb + 1) * nt
    ones = np.ones(max(len(powers_a), len(powers_b)))
    h, half, cart = np.zeros((pure_a.shape[1], pure_b.shape[1], nh)), np.empty((pure_b.shape[1], nh)), np.empty(nh)
    size_of_terms, half_size = np.zeros_like(h), np.empty_like(half)
    for a in range(len(powers_a)):
        half[:] = 0.0
        half_size[:] = 0.0
        for b in range(len(powers_b)):
            for p in range(nh):
                x, y, z = triples[p, 0], triples[p, 1], triples[p, 2]
                value = h_element(a, a + 1, powers_a, ones, b, b + 1, powers_b, ones, x, y, z, lb, nt, size, e)
                cart[p] = -value if ket and (x + y + z) % 2 == 1 else value
            for m in range(pure_b.shape[1]):
                if pure_b[b, m] != 0.0:
                    add_scaled(half[m], pure_b[b, m], cart)
                    add_scaled(half_size[m], abs(pure_b[b, m]), np.abs(cart))
        for m in range(pure_a.shape[1]):
            if pure_a[a, m] != 0.0:
                add_scaled(h[m].reshape(-1), pure_a[a, m], half.reshape(-1))
                add_scaled(size_of_terms[m].reshape(-1), abs(pure_a[a, m]), half_size.reshape(-1))
    elements, sizes = h.reshape(-1), size_of_terms.reshape(-1)
    for n in range(len(elements)):  # no `np.where`, which takes long to compile
        if not abs(elements[n]) > NOISE * sizes[n]:
            elements[n] = 0.0
    return h


def h_loop(start, owner, la, lb, exponent, pa, pb, coef_a, coef_b, tables_a, tables_b, triples, ket, out):
    """Step 1 for all primitive pairs. `out` is flat; the block of pair n begins at start[n] * nab * nherm."""
    (powers_a, pure_a), (powers_b, pure_b) = tables_a, tables_b
    nh = len(triples)
    for k in prange(len(exponent)):
        e = e_coefficients(la, lb, exponent[k], pa[k], pb[k])
        h = primitive_h(la, lb, e, powers_a, powers_b, pure_a, pure_b, triples, ket)
        pair = owner[k]
        primitives = start[pair + 1] - start[pair]
        row = start[pair] * coef_a.shape[1] * pure_a.shape[1] * coef_b.shape[1] * pure_b.shape[1] * nh
        row += (k - start[pair]) * nh
        for ca in range(coef_a.shape[1]):
            for ma in range(pure_a.shape[1]):
                for cb in range(coef_b.shape[1]):
                    for mb in range(pure_b.shape[1]):
                        for p in range(nh):
                            out[row + p] = coef_a[k, ca] * coef_b[k, cb] * h[ma, mb, p]
                        row += primitives * nh


@njit(error_model="numpy")
def recur(l, zero, rx, ry, rz, words, new, old):
    """r[t]^(0) of LANES primitive quartets.

    The array that is returned is `new` or `old`. Arrays have the layout [m or t][lane].
    """
    for m in range(l, -1, -1):
        new, old = old, new
        for lane in range(LANES):
            new[lane] = zero[m * LANES + lane]
        degree = l - m
        for t in range(1, (degree + 1) * (degree + 2) * (degree + 3) // 6):
            indices, rule = words[t, 0], words[t, 1]
            for lane in range(LANES):
                new[t * LANES + lane] = r_step(indices, rule, rx[lane], ry[lane], rz[lane], old, lane)
    return new


def r_loop(l, bra_exponent, bra_centre, ket_exponent, ket_centre, parameter, table, words, r):
    """Steps 2 and 3: r[i, k, t] for all bra primitives i and ket primitives k, LANES of k side by side."""
    nket, size = r.shape[1], r.shape[2]
    blocks = (nket + LANES - 1) // LANES
    for n in prange(len(bra_exponent) * blocks):
        i, first = n // blocks, n % blocks * LANES
        rx, ry, rz, zero = np.empty(LANES), np.empty(LANES), np.empty(LANES), np.empty((l + 1) * LANES)
        for lane in range(LANES):
            k = min(first + lane, nket - 1)
            rx[lane] = bra_centre[i, 0] - ket_centre[k, 0]
            ry[lane] = bra_centre[i, 1] - ket_centre[k, 1]
            rz[lane] = bra_centre[i, 2] - ket_centre[k, 2]
            r2 = rx[lane] * rx[lane] + ry[lane] * ry[lane] + rz[lane] * rz[lane]
            zeros(l, bra_exponent[i], ket_exponent[k], r2, parameter, table, zero, lane, LANES)
        last = recur(l, zero, rx, ry, rz, words, np.empty(size * LANES), np.empty(size * LANES))
        for lane in range(min(LANES, nket - first)):
            target = r[i, first + lane]
            for t in range(size):
                target[t] = last[t * LANES + lane]


def assemble_loop(r, index, pq):
    """pq[i N_p + p, k N_q + q] = r[i, k, idx(p+q)]."""
    nbra, nket = r.shape[:2]
    np_, nq = index.shape
    for n in prange(nbra * np_):
        i, p = n // np_, n % np_
        where = index[p]
        for k in range(nket):
            source, target = r[i, k], pq[n, k * nq : (k + 1) * nq]
            for q in range(nq):
                target[q] = source[where[q]]


def scatter_loop(block, bra, ket, ao_bra, ao_ket, same_pieces, swap, box, out):
    """Writes a block to an AO tensor; see `md4.method.scatter`."""
    nij, nkl, na, nb, nc, nd = block.shape
    for n in prange(nij):
        same_ab = bra[n, 0] == bra[n, 1]
        for m in range(nkl):
            same_cd = ket[m, 0] == ket[m, 1]
            for a, b, c, d in np.ndindex(na, nb, nc, nd):
                if not is_repeated(same_ab, same_cd, same_pieces, n, m, a, b, c, d, nb, nd):
                    i, j, k, l = ao_bra[n, 0] + a, ao_bra[n, 1] + b, ao_ket[m, 0] + c, ao_ket[m, 1] + d
                    place(block[n, m, a, b, c, d], i, j, k, l, swap, box, out)


@cache
def gather_index(l_bra, l_ket):
    """Shape (N_p, N_q), uint32: idx(p+q). It is unsigned, since Numba would handle negative indices at every use."""
    p, q = packed_hermite(l_bra), packed_hermite(l_ket)
    return sum_ordinal(p[:, None], q[None, :]).astype(np.uint32)


@cache
def lane_table(l):
    """`recurrence.recurrence_table` for arrays [t][lane]: the ordinals are multiplied by LANES."""
    words = recurrence.recurrence_table(l).astype(np.uint32)
    words[:, 0] *= LANES
    return words


@cache
def angular_tables(l, pure):
    """Packed powers of the monomials of a shell, and the coefficients of its components."""
    c = component_coefficients(l, pure).copy()
    c[abs(c) < 1e-14 * abs(c).max()] = 0.0  # rounding noise of zeros by symmetry
    return packed_powers(l), c

weight_of = njit(quartet_weight)


@njit(fastmath=True)
def digest_k(integrals, weight, a0, b0, c0, d0, density, x):
    """Adds one quartet, shape (na, nb, nc, nd), to X of one density matrix."""
    na, nb, nc, nd = integrals.shape
    for a in range(na):
        for b in range(nb):
            for c in range(nc):
                ac = bc = 0.0
                d_bc, d_ac = weight * density[b0 + b, c0 + c], weight * density[a0 + a, c0 + c]
                row = integrals[a, b, c]
                for d in range(nd):
                    value = row[d]
                    x[a0 + a, d0 + d] += value * d_bc
                    x[b0 + b, d0 + d] += value * d_ac
                    ac += value * density[b0 + b, d0 + d]
                    bc += value * density[a0 + a, d0 + d]
                x[a0 + a, c0 + c] += weight * ac
                x[b0 + b, c0 + c] += weight * bc


@njit(fastmath=True)
def digest_j(integrals, weight, a0, b0, c0, d0, twice, y):
    """Adds one quartet to Y; `twice` is D + D^T."""
    na, nb, nc, nd = integrals.shape
    for a in range(na):
        for b in range(nb):
            ab, d_ab = 0.0, weight * twice[a0 + a, b0 + b]
            for c in range(nc):
                row = integrals[a, b, c]
                for d in range(nd):
                    ab += row[d] * twice[c0 + c, d0 + d]
                    y[c0 + c, d0 + d] += row[d] * d_ab
            y[a0 + a, b0 + b] += weight * ab


def digest_loop(block, ao_bra, ao_ket, triangle, first_bra, first_ket, densities, twice, x, y):
    """Adds a block to X and Y, shapes (threads, n, nao, nao), of which each thread has its own.

    `first_bra` and `first_ket` are the places of the first pairs in their list; see `quartet_weight`.
    """
    threads = len(y)
    for thread in prange(threads):
        for n in range(thread, len(ao_bra), threads):
            a, b = ao_bra[n]
            for m in range(len(ao_ket)):
                c, d = ao_ket[m]
                weight = weight_of(a, b, c, d, triangle, first_bra + n, first_ket + m)
                if weight == 0.0:
                    continue
                for s in range(len(densities)):
                    digest_k(block[n, m], weight, a, b, c, d, densities[s], x[thread, s])
                for s in range(len(twice)):
                    digest_j(block[n, m], weight, a, b, c, d, twice[s], y[thread, s])


def contract_loop(r, index, sign, triangle, first_bra, first_ket, d_bra, d_ket, j_bra, j_ket):
    """Multiplies r[i, k, t] of a chunk by the densities of both sides.

    The results are added to `j_bra`, shape (n, nbra, N_p), and to `j_ket`, shape (threads, n, nket, N_q), of which each
    thread has its own. `first_bra` and `first_ket` are the places of the first primitive pairs in their list. They
    matter if bra and ket are the same list (`triangle`).
    """
    threads, count, nket, nq = j_ket.shape
    for thread in prange(threads):
        for i in range(thread, len(r), threads):
            for k in range(nket):
                weight = 1.0
                if triangle and first_ket + k >= first_bra + i:
                    if first_ket + k > first_bra + i:
                        break
                    weight = 0.5
                values = r[i, k]
                for s in range(count):
                    density, target = d_ket[s, k], j_ket[thread, s, k]
                    for p in range(len(sign)):
                        total, d_p, where = 0.0, weight * sign[p] * d_bra[s, i, p], index[p]
                        for q in range(nq):
                            value = values[where[q]]
                            total += value * density[q]
                            target[q] += value * d_p
                        j_bra[s, i, p] += weight * sign[p] * total


h_matrices = once(lambda: Loop(h_loop))
assemble = once(lambda: Loop(assemble_loop))
digest_blocks = once(lambda: Loop(digest_loop))
contract_r = once(lambda: Loop(contract_loop))


@once
def r_integrals(kind):
    return Loop(r_loop, f"r_loop_{kind}", zeros=operators.zeros_function(kind, njit))


@once
def scatter_blocks(aosym):
    return Loop(scatter_loop, f"scatter_loop_{aosym}", place=scatter.make_place(aosym, njit))


# All that make compiled loops.
FACTORIES = (h_matrices, r_integrals, assemble, scatter_blocks, digest_blocks, contract_r)
