"""The CPU backend: the steps of the method on NumPy and Numba, matrix products by BLAS.

H matrices are stored flat, one (nab, K N_p) block a shell pair with K its primitive pairs, so that the sum over
primitives is part of each product's inner dimension.
"""

import os
from functools import cache

import numpy as np
from numba import njit, prange

from md4 import hermite, operators, recurrence, scatter
from md4.angular import hermite_triples, nherm, packed_hermite, sum_ordinal
from md4.errors import DeviceError
from md4.memory import check_out, tensor_refusal

# [p|q] of one chunk is kept near this size (bytes), so that it is still in cache when BLAS reads it.
PQ_BYTES = 8 << 20

e_coefficient = njit(hermite.e_coefficient)
h_element = njit(hermite.h_element)
r_step = njit(recurrence.r_step)


@njit(parallel=True)
def h_matrices(start, owner, la, lb, nt, size, exponent, pa, pb, coef_a, coef_b, table_a, table_b, triples, sign, out):
    """Step 1 for all primitive pairs; out is flat, block of pair n at start[n] * nab * nherm."""
    start_a, powers_a, weights_a = table_a
    start_b, powers_b, weights_b = table_b
    ncomp_a, ncomp_b, nctr_a, nctr_b = len(start_a) - 1, len(start_b) - 1, coef_a.shape[1], coef_b.shape[1]
    nh = len(triples)
    nab = nctr_a * ncomp_a * nctr_b * ncomp_b
    for k in prange(len(exponent)):
        e = np.empty(3 * size)
        half = 0.5 / exponent[k]
        for axis in range(3):
            for i in range(la + 1):
                for j in range(lb + 1):
                    for t in range(nt):
                        position = axis * size + (i * (lb + 1) + j) * nt + t
                        e[position] = e_coefficient(i, j, t, lb, nt, half, pa[k, axis], pb[k, axis], e, axis * size)
        pair = owner[k]
        width = (start[pair + 1] - start[pair]) * nh
        base = start[pair] * nab * nh + (k - start[pair]) * nh
        for ma in range(ncomp_a):
            for mb in range(ncomp_b):
                a0, a1, b0, b1 = start_a[ma], start_a[ma + 1], start_b[mb], start_b[mb + 1]
                for p in range(nh):
                    px, py, pz = triples[p]
                    h = h_element(
                        a0, a1, powers_a, weights_a, b0, b1, powers_b, weights_b, px, py, pz, lb, nt, size, e
                    )
                    if sign and (px + py + pz) % 2 == 1:
                        h = -h
                    for ca in range(nctr_a):
                        for cb in range(nctr_b):
                            row = ((ca * ncomp_a + ma) * nctr_b + cb) * ncomp_b + mb
                            out[base + row * width + p] = coef_a[k, ca] * coef_b[k, cb] * h


@cache
def r_integrals(kind):
    """Compiled steps 2 and 3 of one operator."""
    zeros = operators.zeros_function(kind, njit)

    @njit(parallel=True)
    def compute(l, bra_exponent, bra_centre, ket_exponent, ket_centre, parameter, table, words, r):
        """r[i, k, t] for all bra primitives i and ket primitives k."""
        nket = len(ket_exponent)
        for n in prange(len(bra_exponent) * nket):
            i, k = n // nket, n % nket
            rx = bra_centre[i, 0] - ket_centre[k, 0]
            ry = bra_centre[i, 1] - ket_centre[k, 1]
            rz = bra_centre[i, 2] - ket_centre[k, 2]
            zero = np.empty(l + 1)
            zeros(l, bra_exponent[i], ket_exponent[k], rx * rx + ry * ry + rz * rz, parameter, table, zero, 0, 1)
            new, old = np.empty(r.shape[2]), np.empty(r.shape[2])
            new[0] = zero[l]
            for m in range(l - 1, -1, -1):
                new, old = old, new
                new[0] = zero[m]
                degree = l - m
                for t in range(1, (degree + 1) * (degree + 2) * (degree + 3) // 6):
                    new[t] = r_step(words[t, 0], words[t, 1], rx, ry, rz, old, 0)
            r[i, k] = new

    return compute


@njit(parallel=True)
def assemble(r, index, pq):
    """pq[i N_p + p, k N_q + q] = r[i, k, idx(p+q)]."""
    nbra, nket = r.shape[:2]
    np_, nq = index.shape
    for n in prange(nbra * np_):
        i, p = n // np_, n % np_
        for k in range(nket):
            for q in range(nq):
                pq[n, k * nq + q] = r[i, k, index[p, q]]


@cache
def gather_index(l_bra, l_ket):
    """Shape (N_p, N_q), int32: idx(p+q)."""
    p, q = packed_hermite(l_bra), packed_hermite(l_ket)
    return sum_ordinal(p[:, None], q[None, :]).astype(np.int32)


@cache
def scatter_blocks(aosym):
    """Compiled writer of a block into an AO tensor; see `md4.scatter`."""
    place, repeated = scatter.make_place(aosym, njit), njit(scatter.is_repeated)

    @njit(parallel=True)
    def write(block, bra, ket, ao_bra, ao_ket, same_pieces, swap, box, out):
        nij, nkl, na, nb, nc, nd = block.shape
        for n in prange(nij):
            same_ab = bra[n, 0] == bra[n, 1]
            for m in range(nkl):
                same_cd = ket[m, 0] == ket[m, 1]
                for a in range(na):
                    for b in range(nb):
                        for c in range(nc):
                            for d in range(nd):
                                if repeated(same_ab, same_cd, same_pieces, n, m, a, b, c, d, nb, nd):
                                    continue
                                i, j, k, l = ao_bra[n, 0] + a, ao_bra[n, 1] + b, ao_ket[m, 0] + c, ao_ket[m, 1] + d
                                place(block[n, m, a, b, c, d], i, j, k, l, swap, box, out)

    return write


class HostTensor:
    """An AO tensor in host memory, filled block by block."""

    def __init__(self, aosym, box, out):
        self.write, self.box, self.out = scatter_blocks(aosym), box, out
        self.flat = out.reshape(-1)

    def scatter(self, block, bra, ket, basis, same_pieces, swap):
        ao_bra, ao_ket = basis.ao_loc[bra.pairs], basis.ao_loc[ket.pairs]
        self.write(block, bra.pairs, ket.pairs, ao_bra, ao_ket, same_pieces, swap, self.box, self.flat)

    def result(self):
        return self.out


class HostBlock:
    """Integrals (ij, kl, ab, cd) in host memory, of any strides."""

    def __init__(self, array):
        self.array = array

    def swapped(self):
        """The same with bra and ket exchanged."""
        return HostBlock(self.array.transpose(1, 0, 3, 2))

    def __getitem__(self, key):
        return self.array[key]


def host_memory():
    """Bytes of memory that the operating system can still give."""
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CpuBackend:
    """Steps of `md4.engine` on the CPU; arrays are NumPy arrays."""

    name = "cpu"

    def __init__(self, operator, max_memory=None):
        self.operator = operator
        self.table = operators.operator_table(operator)
        self.max_memory = max_memory

    def memory_left(self):
        """Bytes that may be allocated."""
        return int(self.max_memory * 1e6) if self.max_memory is not None else host_memory()

    def hermite_bytes(self, pairs):
        """Bytes of the H matrices of `pairs`."""
        return 8 * pairs.nprim * pairs.nab * pairs.nherm

    def least_workspace(self, bra, ket):
        """Bytes that one bra pair with one ket pair takes, H matrices of all of them included."""
        inner = bra.max_prim * bra.nherm, ket.max_prim * ket.nherm
        r = bra.max_prim * ket.max_prim * nherm(bra.l + ket.l)
        chunk = inner[0] * inner[1] + max(bra.nab * inner[1], ket.nab * inner[0]) + r
        return 8 * chunk + self.hermite_bytes(bra) + self.hermite_bytes(ket)

    def chunk_pairs(self, bra, ket):
        """One bra pair at a time with so many ket pairs that [p|q] stays in cache."""
        column = 8 * max(1, bra.max_prim * bra.nherm) * max(1, ket.max_prim) * ket.nherm
        return 1, max(1, PQ_BYTES // column)

    def result(self, shape, out=None):
        """An array for results: `out` if given and right, or a new one."""
        return np.empty(shape) if out is None else check_out(out, shape)

    def target(self, aosym, box, shape, out, device, least_block):
        """The AO tensor to fill."""
        if device:
            raise DeviceError("device=True keeps the result on a GPU; it needs backend='cuda'.")
        need = least_block + (8 * int(np.prod(shape, dtype=object)) if out is None else 0)
        if need > self.memory_left():
            raise tensor_refusal(shape, need, self.memory_left())
        if out is None and self.max_memory is not None:
            self.max_memory -= 8e-6 * np.prod(shape, dtype=object)
        return HostTensor(aosym, box, np.empty(shape) if out is None else out)

    def scratch(self, shape):
        """Room for one block."""
        return np.empty(shape)

    def block(self, out):
        """`out` of six indices as a block (ij, kl, ab, cd)."""
        nij, nkl, na, nb, nc, nd = out.shape
        return HostBlock(out.reshape(nij, nkl, na * nb, nc * nd))

    def upload(self, pairs):
        """Nothing to do: the arrays are where they are used."""
        return None

    def release(self, h):
        """Nothing to do: H matrices go with their last reference."""

    def hermite(self, prepared, ket):
        """Step 1: flat H blocks of `prepared`; for a `ket`, (-1)^|q| included."""
        pairs = prepared.pairs
        h = np.empty(pairs.nprim * pairs.nab * pairs.nherm)
        owner = np.repeat(np.arange(pairs.npair), np.diff(pairs.start))
        h_matrices(
            pairs.start, owner, pairs.la, pairs.lb, pairs.l + 1, hermite.axis_size(pairs.la, pairs.lb),
            pairs.exponent, pairs.pa, pairs.pb, pairs.coef_a, pairs.coef_b,
            hermite.component_table(pairs.la, pairs.pure), hermite.component_table(pairs.lb, pairs.pure),
            hermite_triples(pairs.l), ket, h,
        )  # fmt: skip
        return h

    def r(self, ab, cd):
        """Steps 2 and 3: r[i, k, t], shape (bra primitives, ket primitives, nherm(L))."""
        bra, ket = ab.pairs, cd.pairs
        l = bra.l + ket.l
        r = np.empty((bra.nprim, ket.nprim, nherm(l)))
        r_integrals(self.operator.kind)(
            l, bra.exponent, bra.centre, ket.exponent, ket.centre,
            self.operator.parameter, self.table, recurrence.recurrence_table(l), r,
        )  # fmt: skip
        return r

    def transform_bra(self, h, ab, cd, r):
        """Step 4: (ab|q], shape (bra pairs, nab, ket primitives * N_q); [p|q] is assembled a bra pair at a time."""
        bra, ket = ab.pairs, cd.pairs
        index = gather_index(bra.l, ket.l)
        abq = np.empty((bra.npair, bra.nab, ket.nprim * ket.nherm))
        pq = np.empty((bra.max_prim * bra.nherm, abq.shape[2]))
        for n in range(bra.npair):
            first, last = bra.start[n], bra.start[n + 1]
            inner = (last - first) * bra.nherm
            assemble(r[first:last], index, pq[:inner])
            np.matmul(h_block(h, ab, n, n + 1)[0], pq[:inner], out=abq[n])
        return abq

    def transform_ket(self, abq, h, ab, cd, out):
        """Step 5: (ab|cd) into out, shape (bra pairs, ket pairs, nab, ncd) of any strides."""
        ket = cd.pairs
        nprims = np.diff(ket.start)
        edges = np.flatnonzero(np.diff(nprims, prepend=-1, append=-1))
        for first, last in zip(edges[:-1], edges[1:]):
            columns = slice(ket.start[first] * ket.nherm, ket.start[last] * ket.nherm)
            h_cd = h_block(h, cd, first, last)
            left = abq[:, :, columns].reshape(len(abq), abq.shape[1], last - first, h_cd.shape[2])
            np.matmul(left.transpose(0, 2, 1, 3), h_cd.transpose(0, 2, 1), out=out[:, first:last])


def h_block(h, prepared, first, last):
    """H of the pairs first..last of a slice, which have equally many primitives: shape (pairs, nab, K N_p)."""
    pairs = prepared.pairs
    size = pairs.nab * pairs.nherm
    block = h[(prepared.first_prim + pairs.start[first]) * size : (prepared.first_prim + pairs.start[last]) * size]
    inner = int(pairs.start[first + 1] - pairs.start[first]) * pairs.nherm
    return block.reshape(last - first, pairs.nab, inner)
