"""Digestion of blocks (ij, kl, a, b, c, d) into J and K: what both backends share, and the loops of the CPU.

Of the eight permutations of a unique shell quartet, four and two are summed,

    X_ad += (ab|cd) D_bc    X_bd += (ab|cd) D_ac    X_ac += (ab|cd) D_bd    X_bc += (ab|cd) D_ad
    Y_ab += (ab|cd) (D_cd + D_dc)                   Y_cd += (ab|cd) (D_ab + D_ba)

the others follow from transposition: J = Y + Y^T, and K[D] = X[D] + X[D^T]^T. A quartet counts half for each of
a, b one shell; c, d one shell; ab, cd one pair.
"""

import numba
import numpy as np
from numba import njit, prange

HALF = 0.5


def digest_ranges(n_k, n_j):
    """(first, last) of the matrices of each digestion of blocks into n_k matrices X and n_j matrices Y.

    First those of which both are wanted, then the others' X or Y.
    """
    both, most = min(n_k, n_j), max(n_k, n_j)
    return tuple(ends for ends in ((0, both), (both, most)) if ends[0] < ends[1])


def digest_flags(n_k, n_j):
    """(exchange, coulomb) of each of `digest_ranges`."""
    return tuple((first < n_k, first < n_j) for first, _ in digest_ranges(n_k, n_j))


def quartet_weight(a, b, c, d, triangle, i, k):
    """Weight of a quartet by the first AOs of its shells; 0 for a ket pair k beyond bra pair i of the same list.

    Device function; `triangle` says that bra and ket are one list, i and k places in it.
    """
    weight = 1.0
    if a == b:
        weight *= HALF
    if c == d:
        weight *= HALF
    if triangle:
        if k > i:
            weight = 0.0
        elif k == i:
            weight *= HALF
    return weight


weight_of = njit(quartet_weight)


@njit(fastmath=True)
def digest_k(integrals, weight, a0, b0, c0, d0, density, x):
    """One quartet, shape (na, nb, nc, nd), into X for one density matrix."""
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
    """One quartet into Y; `twice` is D + D^T."""
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
    """A block into X and Y, shapes (threads, n, nao, nao); each thread sums its own, `first_*` as `quartet_weight`."""
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


class HostDigest:
    """X and Y in host memory, summed block by block.

    Parameters
    ----------
    memory : md4.memory.HostMemory
    densities : ndarray, shape (n_k, nao, nao)
        Of X; none if n_k = 0.
    twice : ndarray, shape (n_j, nao, nao)
        D + D^T of Y.
    loop : callable
        `digest_loop`, compiled.
    """

    def __init__(self, memory, densities, twice, loop):
        # one layout, or the loop would be compiled for each
        self.densities, self.twice, self.loop = np.ascontiguousarray(densities), np.ascontiguousarray(twice), loop
        threads = numba.get_num_threads()
        self.x, self.y = (memory.zeros((threads, *matrices.shape)) for matrices in (densities, twice))

    def add(self, block, bra, ket, basis, triangle):
        """Digests one block; `bra` and `ket` are `PreparedPairs`, slices of one list if `triangle`."""
        ao_bra, ao_ket = basis.ao_loc[bra.pairs.pairs], basis.ao_loc[ket.pairs.pairs]
        self.loop(block, ao_bra, ao_ket, triangle, bra.first, ket.first, self.densities, self.twice, self.x, self.y)

    def result(self):
        """(X, Y), shapes (n_k, nao, nao) and (n_j, nao, nao)."""
        return self.x.sum(axis=0), self.y.sum(axis=0)
