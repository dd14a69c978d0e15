"""The CPU backend: the steps of the method on NumPy and Numba, matrix products by BLAS.

H matrices are stored flat, one (nab, K N_p) block a shell pair with K its primitive pairs, so that the sum over
primitives is part of each product's inner dimension. A chunk's [p|q] is one matrix, rows (bra primitive, p) and columns
(ket primitive, q): transform 1 is one product for each bra pair with all ket pairs, transform 2 one for each ket pair
with all bra pairs, so that small classes, too, make large matrices.
"""

import os
from copy import copy
from functools import cache
from itertools import pairwise
from math import isqrt
from types import FunctionType

import numba
import numpy as np
from numba import njit, prange

from md4 import coulomb, digest, hermite, operators, recurrence, scatter
from md4.angular import cartesian_triples, component_coefficients, hermite_triples, nherm, packed_hermite, sum_ordinal
from md4.cache import cache_folder, fingerprint
from md4.errors import DeviceError
from md4.hermite import NOISE
from md4.memory import check_out, tensor_refusal
from md4.plan import Plan, cheaper_swapped

# [p|q] of one chunk is kept near this size (bytes): still in cache when BLAS reads it, and work enough for each step.
PQ_BYTES = 4 << 20
# Ket primitives that go through the recurrence side by side: a vector register of doubles.
LANES = 8

# Compilation ----------------------------------------------------------------------------------------------------------


def compiled(function, name=None, **callees):
    """`function` compiled by Numba with its prange loops in parallel, kept on disk under `name`.

    `callees` are device functions that it calls by these names. They are bound as globals, since Numba's disk cache
    never finds a function again whose closure holds compiled ones.
    """
    names = {**function.__globals__, **callees}
    bound = FunctionType(function.__code__, names, name or function.__name__)
    bound.__qualname__, bound.__module__ = bound.__name__, function.__module__
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder() / fingerprint())
    try:
        return njit(parallel=True, error_model="numpy", cache=True)(bound)
    except RuntimeError:  # no folder that can be written to: costs time, not results
        return njit(parallel=True, error_model="numpy")(bound)
    finally:
        numba.config.CACHE_DIR = before


# Compiled steps -------------------------------------------------------------------------------------------------------

e_coefficient, h_element, r_step = njit(hermite.e_coefficient), njit(hermite.h_element), njit(recurrence.r_step)
is_repeated = njit(scatter.is_repeated)
zeros = place = None  # bound by `compiled`, for one operator or one symmetry


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
    """H[ma, mb, p] of one primitive pair: Cartesian, then b and a to components by `pure_b` and `pure_a`."""
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
    return np.where(np.abs(h) > NOISE * size_of_terms, h, 0.0)


def h_loop(start, owner, la, lb, exponent, pa, pb, coef_a, coef_b, tables_a, tables_b, triples, ket, out):
    """Step 1 for all primitive pairs; out is flat, block of pair n at start[n] * nab * nherm."""
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
    """r[t]^(0) of LANES primitive quartets in the array that is returned, `new` or `old`; arrays are [m or t][lane]."""
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
    """A block into an AO tensor; see `md4.scatter`."""
    nij, nkl, na, nb, nc, nd = block.shape
    for n in prange(nij):
        same_ab = bra[n, 0] == bra[n, 1]
        for m in range(nkl):
            same_cd = ket[m, 0] == ket[m, 1]
            for a, b, c, d in np.ndindex(na, nb, nc, nd):
                if not is_repeated(same_ab, same_cd, same_pieces, n, m, a, b, c, d, nb, nd):
                    i, j, k, l = ao_bra[n, 0] + a, ao_bra[n, 1] + b, ao_ket[m, 0] + c, ao_ket[m, 1] + d
                    place(block[n, m, a, b, c, d], i, j, k, l, swap, box, out)


h_matrices = cache(lambda: compiled(h_loop))
assemble = cache(lambda: compiled(assemble_loop))


digest_blocks = cache(lambda: compiled(digest.digest_loop))
contract_r = cache(lambda: compiled(coulomb.contract_loop))


@cache
def r_integrals(kind):
    return compiled(r_loop, f"r_loop_{kind}", zeros=operators.zeros_function(kind, njit))


@cache
def scatter_blocks(aosym):
    return compiled(scatter_loop, f"scatter_loop_{aosym}", place=scatter.make_place(aosym, njit))


@cache
def gather_index(l_bra, l_ket):
    """Shape (N_p, N_q), uint32: idx(p+q). Unsigned, since Numba would look for negative ones at every use."""
    p, q = packed_hermite(l_bra), packed_hermite(l_ket)
    return sum_ordinal(p[:, None], q[None, :]).astype(np.uint32)


@cache
def lane_table(l):
    """`recurrence.recurrence_table` for arrays [t][lane]: its ordinals times LANES."""
    words = recurrence.recurrence_table(l).astype(np.uint32)
    words[:, 0] *= LANES
    return words


@cache
def angular_tables(l, pure):
    """Packed powers of a shell's monomials (see `hermite.component_table`), and its components in terms of them."""
    x, y, z = cartesian_triples(l).T
    c = component_coefficients(l, pure).copy()
    c[abs(c) < 1e-14 * abs(c).max()] = 0.0  # rounding noise where symmetry has a zero
    return (x + (y << 8) + (z << 16)).astype(np.int32), c


# The backend ----------------------------------------------------------------------------------------------------------


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
        self.taken = 0  # bytes of the block that is being filled
        self.kept = {}

    def memory_left(self):
        """Bytes that may be allocated."""
        return int(self.max_memory * 1e6) if self.max_memory is not None else host_memory()

    def facts(self):
        """What there is to show of it, as (name, value); asks nothing."""
        from md4.display import size_text

        cap = "none" if self.max_memory is None else f"{self.max_memory:g} MB"
        kept = sum(array.nbytes for array in self.kept.values())
        made = (h_matrices, r_integrals, assemble, scatter_blocks, digest_blocks, contract_r)
        loops = sum(loop.cache_info().currsize for loop in made)
        return [("threads", numba.get_num_threads()), ("workspace kept", size_text(kept)), ("memory cap", cap),
                ("compiled loops in use", loops)]  # fmt: skip

    def with_operator(self, operator):
        """The same with another operator; workspaces are shared."""
        other = copy(self)
        other.operator, other.table = operator, operators.operator_table(operator)
        return other

    def hermite_bytes(self, pairs):
        """Bytes of the H matrices of `pairs`."""
        return 8 * pairs.nprim * pairs.nab * pairs.nherm

    def workspace(self, name, shape):
        """An array that the next call under this `name` takes again: fresh memory costs page faults."""
        size = int(np.prod(shape))
        if name not in self.kept or len(self.kept[name]) < size:
            self.kept[name] = np.empty(size)
        return self.kept[name][:size].reshape(shape)

    def chunk_bytes(self, bra, ket):
        """Bytes that one bra pair with one ket pair takes at most: r, [p|q], (ab|q] and (ab|cd)."""
        inner = bra.max_prim * bra.nherm, ket.max_prim * ket.nherm
        r = bra.max_prim * ket.max_prim * nherm(bra.l + ket.l)
        return 8 * (r + inner[0] * inner[1] + max(bra.nab * inner[1], ket.nab * inner[0]) + bra.nab * ket.nab)

    def least_workspace(self, bra, ket):
        """Bytes that one bra pair with one ket pair takes, H matrices of all of them included."""
        return self.chunk_bytes(bra, ket) + self.hermite_bytes(bra) + self.hermite_bytes(ket)

    def chunk_pairs(self, plan, bra, ket):
        """Bra and ket pairs whose [p|q] stays in cache, about as many of each but at least a few LANES of ket pairs."""
        room = PQ_BYTES
        if self.max_memory is not None:
            held = self.taken + self.hermite_bytes(bra) + self.hermite_bytes(ket)
            room = min(room, (self.memory_left() - held) // 3)
        area = max(1, room // self.chunk_bytes(bra, ket))
        nket = min(len(ket), max(isqrt(area), min(area, 2 * LANES)))
        nbra = max(1, min(len(bra), area // nket))
        return nbra, max(1, area // nbra)

    def result(self, shape, out=None):
        """An array for results: `out` if given and right, or a new one."""
        return self.scratch(shape) if out is None else check_out(out, shape)

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
        block = np.empty(shape)
        self.taken = block.nbytes
        return block

    def pair_diagonal(self, block):
        """(ab|ab) of a block of a pair list with itself, shape (npair, na, nb)."""
        return np.einsum("iiabab->iab", block).copy()

    def fetch_diagonal(self, diagonal):
        """Nothing to do: it is in host memory."""
        return diagonal

    @property
    def digest_copies(self):
        """Copies of J and K that a build keeps: one a thread."""
        return numba.get_num_threads()

    def digest_swapped(self, bra, ket):
        """Whether bra and ket should change places for the digestion: the longer rows last."""
        return ket.nab < bra.nab

    def digest(self, densities, twice):
        """What sums J and K of blocks; see `md4.digest.HostDigest`."""
        return digest.HostDigest(densities, twice, digest_blocks())

    def coulomb(self, basis, twice):
        """What sums J alone; see `md4.coulomb.HostCoulomb`."""
        return coulomb.HostCoulomb(self, basis, twice)

    def coulomb_bytes(self, pairs):
        """Bytes that it keeps of a list for one density matrix."""
        return coulomb.hermite_bytes(pairs, pairs.nherm)

    def contract(self, r, ab, cd, *args):
        """`md4.coulomb.contract_loop` on r of a chunk."""
        contract_r()(r, gather_index(ab.pairs.l, cd.pairs.l), *args)

    def hermite_runs(self, prepared):
        """Runs of pairs with equally many primitives: pairs, primitive pairs, H[ab, q] with (-1)^|q|."""
        for run, inner, h in h_runs(prepared.h("ket"), prepared):
            yield run, slice(inner.start // prepared.pairs.nherm, inner.stop // prepared.pairs.nherm), h

    def block(self, out):
        """`out` of six indices as a block (ij, kl, ab, cd)."""
        nij, nkl, na, nb, nc, nd = out.shape
        return HostBlock(out.reshape(nij, nkl, na * nb, nc * nd))

    def upload(self, pairs):
        """Nothing to do: the arrays are where they are used."""
        return None

    def release(self, h):
        """Nothing to do: H matrices go with their last reference."""

    def plan(self, bra, ket):
        """The cheaper side first; one way for all classes."""
        return Plan(cheaper_swapped(bra, ket))

    def hermite(self, prepared, form):
        """Step 1: flat H blocks of `prepared`; for a 'ket', (-1)^|q| included."""
        pairs = prepared.pairs
        h = np.empty(pairs.nprim * pairs.nab * pairs.nherm)
        owner = np.repeat(np.arange(pairs.npair), np.diff(pairs.start))
        h_matrices()(
            pairs.start, owner, pairs.la, pairs.lb, pairs.exponent, pairs.pa, pairs.pb, pairs.coef_a, pairs.coef_b,
            *(angular_tables(l, pairs.pure) for l in (pairs.la, pairs.lb)), hermite_triples(pairs.l), form == "ket", h,
        )  # fmt: skip
        return h

    def r(self, plan, ab, cd):
        """Steps 2 and 3: r[i, k, t], shape (bra primitives, ket primitives, nherm(L))."""
        bra, ket = ab.pairs, cd.pairs
        l = bra.l + ket.l
        r = self.workspace("r", (bra.nprim, ket.nprim, nherm(l)))
        r_integrals(self.operator.kind)(
            l, bra.exponent, bra.centre, ket.exponent, ket.centre,
            self.operator.parameter, self.table, lane_table(l), r,
        )  # fmt: skip
        return r

    def transform_bra(self, plan, h, ab, cd, r):
        """Step 4: (ab|q], shape (bra pairs, nab, ket primitives * N_q)."""
        bra, ket = ab.pairs, cd.pairs
        pq = self.workspace("pq", (bra.nprim * bra.nherm, ket.nprim * ket.nherm))
        assemble()(r, gather_index(bra.l, ket.l), pq)
        abq = self.workspace("abq", (bra.npair, bra.nab, pq.shape[1]))
        for run, rows, h_ab in h_runs(h, ab):
            np.matmul(h_ab, pq[rows].reshape(len(h_ab), h_ab.shape[2], pq.shape[1]), out=abq[run])
        return abq

    def transform_ket(self, plan, abq, h, ab, cd, out):
        """Step 5: (ab|cd) into out, shape (bra pairs, ket pairs, nab, ncd) of any strides."""
        nbra, nab, inner = abq.shape
        rows = abq.reshape(nbra * nab, inner)
        for run, columns, h_cd in h_runs(h, cd):
            left = rows[:, columns].reshape(len(rows), len(h_cd), h_cd.shape[2])
            block = np.matmul(left.transpose(1, 0, 2), h_cd.transpose(0, 2, 1))
            out[:, run] = block.reshape(len(h_cd), nbra, nab, cd.pairs.nab).transpose(1, 0, 2, 3)


def h_runs(h, prepared):
    """Runs of pairs with equally many primitives K: the pairs, their inner indices, H of shape (pairs, nab, K N_p)."""
    pairs = prepared.pairs
    size, start = pairs.nab * pairs.nherm, pairs.start
    counts = start[1:] - start[:-1]
    edges = [0, *(np.flatnonzero(counts[1:] != counts[:-1]) + 1).tolist(), len(pairs)]
    for first, last in pairwise(edges):
        a, b = int(start[first]), int(start[last])
        block = h[(prepared.first_prim + a) * size : (prepared.first_prim + b) * size]
        inner = slice(a * pairs.nherm, b * pairs.nherm)
        yield slice(first, last), inner, block.reshape(last - first, pairs.nab, int(counts[first]) * pairs.nherm)
