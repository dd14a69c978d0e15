"""J in the Hermite basis: what a build of J alone needs, for which no integral is transformed.

    D_q = sum_cd H[cd, q] w_cd (D_cd + D_dc)      densities of primitive pairs; w = 1/2 where c, d are one shell, else 1
    J_p = sum_q r[p+q] D_q                        over all primitive pairs
    Y_ab = w_ab sum_p H[ab, p] J_p ,              J = Y + Y^T

H carries (-1)^|q| throughout, so D and J do; of the side that plays the bra, the sign is taken off where r is used.
Each unordered pair of primitive pairs comes once, and r[p+q] serves both: J_p += r D_q and J_q += r D_p. A primitive
pair with itself counts half in either, and both are the same sum.
"""

from math import isqrt

import numpy as np
from numba import prange

from md4.angular import hermite_triples, nherm
from md4.engine import chunks

# r of one chunk on the CPU is kept near this size (bytes).
R_BYTES = 4 << 20


def hermite_bytes(pairs, width):
    """Bytes of D and J of a list for one density matrix, `width` doubles each for a primitive pair."""
    return 16 * pairs.nprim * width


def signs(l):
    """(-1)^|p| of the Hermite functions up to degree l."""
    return 1.0 - 2.0 * (hermite_triples(l).sum(axis=1) % 2)


def pair_places(basis, pairs):
    """Rows and columns of the functions of each pair in an AO matrix, shapes (npair, na, 1) and (npair, 1, nb)."""
    first = basis.ao_loc[pairs.pairs]
    return first[:, 0, None, None] + np.arange(pairs.na)[:, None], first[:, 1, None, None] + np.arange(pairs.nb)


def pair_weights(pairs):
    """w_ab, shape (npair, 1)."""
    return np.where(pairs.pairs[:, :1] == pairs.pairs[:, 1:], 0.5, 1.0)


def contract_loop(r, index, sign, triangle, first_bra, first_ket, d_bra, d_ket, j_bra, j_ket):
    """r[i, k, t] of a chunk with the densities of both sides.

    `j_bra`, shape (n, nbra, N_p), is added to; a thread's sums of the ket are added to its own of `j_ket`, shape
    (threads, n, nket, N_q). `first_*` are places in the list, which matter if bra and ket are one (`triangle`).
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


class HostCoulomb:
    """D and J in the Hermite basis, in host memory.

    Parameters
    ----------
    backend : md4.cpu.CpuBackend
    basis : md4.Basis
    twice : ndarray, shape (n, nao, nao)
        D + D^T.
    """

    def __init__(self, backend, basis, twice):
        self.backend, self.memory, self.basis, self.twice = backend, backend.memory, basis, twice
        self.y, self.sides = backend.memory.zeros(twice.shape), {}

    def load(self, prepared):
        """D_q of a whole list."""
        pairs, count = prepared.pairs, len(self.twice)
        rows, columns = pair_places(self.basis, pairs)
        values = self.twice[:, rows, columns].reshape(count, len(pairs), 1, pairs.nab) * pair_weights(pairs)[:, None]
        density, sums = (make((count, pairs.nprim, pairs.nherm)) for make in (self.memory.empty, self.memory.zeros))
        for run, prims, h in self.backend.hermite_runs(prepared):
            density[:, prims] = np.matmul(values[:, run], h).reshape(count, -1, pairs.nherm)
        self.sides[prepared] = density, sums

    def add(self, ab, cd, triangle):
        """All of `ab` with all of `cd`, slices of lists that are loaded, of one list if `triangle`."""
        size = 8 * nherm(ab.pairs.l + cd.pairs.l) * max(1, ab.pairs.max_prim * cd.pairs.max_prim)
        most = max(1, int(min(R_BYTES, self.memory.room() / 4)) // size)
        nket = min(len(cd), isqrt(most))
        for ij, kl in chunks(len(ab), len(cd), max(1, most // nket), nket):
            self._contract(ab[ij], cd[kl], triangle)

    def _contract(self, ab, cd, triangle):
        r = self.backend.r(None, ab, cd)
        (d_bra, j_bra), (d_ket, j_ket) = (
            [m[:, s.first_prim : s.first_prim + s.pairs.nprim] for m in self.sides[s.whole]] for s in (ab, cd)
        )
        kets = np.zeros((self.backend.digest_copies, *d_ket.shape))
        places = triangle, ab.first_prim, cd.first_prim
        self.backend.contract(r, ab, cd, signs(ab.pairs.l), *places, d_bra, d_ket, j_bra, kets)
        j_ket += kets.sum(axis=0)

    def collect(self, prepared):
        """Adds what a whole list has summed up to Y."""
        pairs, count = prepared.pairs, len(self.twice)
        sums = self.sides.pop(prepared)[1]
        values = np.zeros((count, len(pairs), 1, pairs.nab))
        for run, prims, h in self.backend.hermite_runs(prepared):
            these = sums[:, prims].reshape(count, len(h), 1, h.shape[2])
            values[:, run] = np.matmul(these, h.transpose(0, 2, 1))
        rows, columns = pair_places(self.basis, pairs)
        self.y[:, rows, columns] += (values * pair_weights(pairs)[:, None]).reshape(count, -1, pairs.na, pairs.nb)

    def result(self):
        """Y, shape (n, nao, nao)."""
        return self.y
