"""J and K on the CPU: sums of blocks, J in the Hermite basis, and Schwarz bounds."""

from math import isqrt

import numba
import numpy as np

from md4.cpu.h_matrices import SIGNED, h_runs
from md4.cpu.loops import contract_r, digest_blocks, gather_index
from md4.method.angular import nherm
from md4.method.hermite_coulomb import hermite_bytes, pair_places, pair_weights, signs
from md4.plan import chunks
from md4.shells.schwarz import row_norms


class HostSums:
    """How the CPU makes J and K; see `md4.backends.Sums`."""

    mixed_shells = 0
    block_bytes = 64 << 20

    def __init__(self, backend):
        self.backend = backend

    @property
    def copies(self):
        """Number of copies of J and K: one for each thread."""
        return numba.get_num_threads()

    def swapped(self, bra, ket):
        """Whether bra and ket change places, so that the longer rows are contiguous."""
        return ket.nab < bra.nab

    def digest(self, densities, twice):
        """Sums of J and K; see `HostDigest`."""
        return HostDigest(self.backend.memory, densities, twice)

    def coulomb(self, basis, twice):
        """J alone; see `HostCoulomb`."""
        return HostCoulomb(self.backend, basis, twice)

    def coulomb_bytes(self, pairs):
        """Bytes of D and J of a list for one density matrix."""
        return hermite_bytes(pairs, pairs.nherm)


class HostBounds:
    """Schwarz bounds in host memory."""

    def __init__(self, count):
        self.values = np.empty(count)

    def add(self, block, first):
        """R_ab of a block of pairs with themselves, from the place `first` on."""
        self.values[first : first + len(block)] = row_norms(np.einsum("iiabab->iab", block))

    def result(self):
        """R_ab, shape (npair,)."""
        return self.values


def hermite_runs(prepared):
    """Yields runs of pairs with the same number of primitives: pairs, primitive pairs, H[ab, q] with (-1)^|q|."""
    for run, inner, h in h_runs(prepared.h(SIGNED), prepared):
        yield run, slice(inner.start // prepared.pairs.nherm, inner.stop // prepared.pairs.nherm), h


class HostDigest:
    """X and Y in host memory, summed block by block.

    Parameters
    ----------
    memory : md4.support.memory.HostMemory
    densities : ndarray, shape (n_k, nao, nao)
        The densities of X; none if n_k = 0.
    twice : ndarray, shape (n_j, nao, nao)
        The D + D^T of Y.
    """

    def __init__(self, memory, densities, twice):
        # always the same layout, since the loop would be compiled for each one
        self.densities, self.twice = np.ascontiguousarray(densities), np.ascontiguousarray(twice)
        threads = numba.get_num_threads()
        self.x, self.y = (memory.zeros((threads, *matrices.shape)) for matrices in (densities, twice))

    def add(self, block, bra, ket, basis, triangle):
        """Digests one block. `bra` and `ket` are `PreparedPairs`, and slices of the same list if `triangle` is true."""
        ao_bra, ao_ket = basis.ao_loc[bra.pairs.pairs], basis.ao_loc[ket.pairs.pairs]
        places = ao_bra, ao_ket, triangle, bra.first, ket.first
        digest_blocks()(block, *places, self.densities, self.twice, self.x, self.y)

    def result(self):
        """(X, Y), shapes (n_k, nao, nao) and (n_j, nao, nao)."""
        return self.x.sum(axis=0), self.y.sum(axis=0)


# Approximate size (bytes) of r of one chunk.
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
        """Makes D_q of a whole list."""
        pairs, count = prepared.pairs, len(self.twice)
        rows, columns = pair_places(self.basis, pairs)
        values = self.twice[:, rows, columns].reshape(count, len(pairs), 1, pairs.nab) * pair_weights(pairs)[:, None]
        density, sums = (make((count, pairs.nprim, pairs.nherm)) for make in (self.memory.empty, self.memory.zeros))
        for run, prims, h in hermite_runs(prepared):
            density[:, prims] = np.matmul(values[:, run], h).reshape(count, -1, pairs.nherm)
        self.sides[prepared] = density, sums

    def add(self, ab, cd, triangle):
        """Adds all of `ab` with all of `cd`. Both are slices of loaded lists, of the same one if `triangle` is true."""
        size = 8 * nherm(ab.pairs.l + cd.pairs.l) * max(1, ab.pairs.max_prim * cd.pairs.max_prim)
        most = max(1, int(min(R_BYTES, self.memory.room() / 4)) // size)
        nket = min(len(cd), isqrt(most))
        for ij, kl in chunks(len(ab), len(cd), max(1, most // nket), nket):
            self._contract(ab[ij], cd[kl], triangle)

    def _contract(self, ab, cd, triangle):
        r = self.backend.r(ab, cd)
        (d_bra, j_bra), (d_ket, j_ket) = (
            [m[:, s.first_prim : s.first_prim + s.pairs.nprim] for m in self.sides[s.whole]] for s in (ab, cd)
        )
        kets = np.zeros((numba.get_num_threads(), *d_ket.shape))
        places = triangle, ab.first_prim, cd.first_prim
        index = gather_index(ab.pairs.l, cd.pairs.l)
        contract_r()(r, index, signs(ab.pairs.l), *places, d_bra, d_ket, j_bra, kets)
        j_ket += kets.sum(axis=0)

    def collect(self, prepared):
        """Adds the sums of a whole list to Y."""
        pairs, count = prepared.pairs, len(self.twice)
        sums = self.sides.pop(prepared)[1]
        values = np.zeros((count, len(pairs), 1, pairs.nab))
        for run, prims, h in hermite_runs(prepared):
            these = sums[:, prims].reshape(count, len(h), 1, h.shape[2])
            values[:, run] = np.matmul(these, h.transpose(0, 2, 1))
        rows, columns = pair_places(self.basis, pairs)
        self.y[:, rows, columns] += (values * pair_weights(pairs)[:, None]).reshape(count, -1, pairs.na, pairs.nb)

    def result(self):
        """Y, shape (n, nao, nao)."""
        return self.y
