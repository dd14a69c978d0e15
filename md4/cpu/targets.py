"""What takes blocks of integrals on the CPU: AO tensors, sums of J and K, and J in the Hermite basis."""

from itertools import pairwise
from math import isqrt

import numba
import numpy as np

from md4.cpu.loops import scatter_blocks
from md4.method.angular import nherm
from md4.method.hermite_coulomb import pair_places, pair_weights, signs
from md4.plan import chunks


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


class HostDigest:
    """X and Y in host memory, summed block by block.

    Parameters
    ----------
    memory : md4.support.memory.HostMemory
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

# r of one chunk on the CPU is kept near this size (bytes).
R_BYTES = 4 << 20


class HostCoulomb:
    """D and J in the Hermite basis, in host memory.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
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
