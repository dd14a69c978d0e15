"""J in the Hermite basis on the GPU: densities and sums of pair lists in device memory.

See `md4.method.hermite_coulomb`.
"""

import numpy as np

from md4.gpu.buffers import clear, copy_to_device, copy_to_host, written_array
from md4.gpu.h_layout import KET_BLOCKS
from md4.gpu.kernels.hermite_coulomb import (
    by_threads,
    hermite_width,
    launch_contraction,
    launch_hermite_densities,
    launch_hermite_sums,
    launch_quartets,
)
from md4.gpu.tuning import HERMITE_COULOMB, r_stride
from md4.plan import chunks


def first_aos(context, prepared, basis):
    """First AOs of the shells of the whole list, (npair, 2) on the device; kept as long as the list is."""
    data = prepared.data
    if data.first_aos is None:
        with context.alone():
            _, (first,) = context.pool.upload([basis.ao_loc[prepared.whole.pairs.pairs]], context.stream)
        data.first_aos = first
    return data.first_aos


class DeviceCoulomb:
    """D and J in the Hermite basis, in device memory; see `md4.backends.CoulombTarget`."""

    def __init__(self, backend, basis, twice):
        self.backend, self.basis, self.shape, self.sides = backend, basis, twice.shape, {}
        context = backend.context
        size, self.buffer = twice.size, context.pool.get(2 * twice.size)
        self.twice, self.y = self.buffer.part(0, (size,)), self.buffer.part(size, (size,))
        copy_to_device(self.twice.pointer, np.ascontiguousarray(twice), context.stream)
        clear(self.y, context.stream)
        self.host = None

    def use(self, backend):
        """`add` works on the track of a backend."""
        self.backend = backend

    def matrices(self, array):
        """The matrices of an array (n, nao, nao) as flat buffers."""
        size = self.shape[1] * self.shape[2]
        return [array.part(n * size, (size,)) for n in range(self.shape[0])]

    def load(self, prepared):
        """D_q of a whole list, and zeros for J_q."""
        backend, pairs = self.backend, prepared.pairs
        size = pairs.nprim * hermite_width(pairs)
        total = self.shape[0] * size
        buffer = backend.context.pool.get(max(1, 2 * total))
        clear(buffer, backend.context.stream)
        densities, sums = buffer.part(0, (total,)), buffer.part(total, (total,))
        h, ao = prepared.h(KET_BLOCKS).array, first_aos(backend.context, prepared, self.basis)
        sides = [tuple(m.part(n * size, (size,)) for m in (densities, sums)) for n in range(self.shape[0])]
        self.sides[prepared] = buffer, sides
        for matrix, (density, _) in zip(self.matrices(self.twice), sides):
            launch_hermite_densities(backend.context, prepared, h, ao, matrix, self.shape[1], density)

    def add(self, ab, cd, triangle):
        """All of `ab` with all of `cd`, slices of lists that are loaded, of one list if `triangle`."""
        if ab.facts.l < cd.facts.l:
            ab, cd = cd, ab
        if ab.nprim == 0 or cd.nprim == 0:
            return
        backend = self.backend
        sides = zip(self.sides[ab.whole][1], self.sides[cd.whole][1])
        if by_threads(ab.facts.l, cd.facts.l):
            for bra, ket in sides:
                launch_quartets(backend.context, backend.operator, ab, cd, triangle, bra, ket)
            return
        sides = list(sides)
        for one, two in self.pieces(ab, cd):
            r = backend.r(one, two)
            for bra, ket in sides:
                launch_contraction(backend.context, one, two, triangle, r, bra, ket)

    def pieces(self, bra, ket):
        """Slices of two lists, by the bytes of their r."""
        size = 8 * r_stride(bra.facts.l + ket.facts.l) * bra.facts.max_prim * ket.facts.max_prim
        most = max(1, self.backend.context.pool.share(HERMITE_COULOMB.r_bytes) // size)
        if bra.npair * ket.npair <= most:
            return [(bra, ket)]
        nket = min(ket.npair, most)
        return ((bra[ij], ket[kl]) for ij, kl in chunks(bra.npair, ket.npair, max(1, most // nket), nket))

    def collect(self, prepared):
        """Adds what a whole list has summed up to Y."""
        backend = self.backend
        buffer, sides = self.sides.pop(prepared)
        h, ao = prepared.h(KET_BLOCKS).array, first_aos(backend.context, prepared, self.basis)
        for (_, sums), y in zip(sides, self.matrices(self.y)):
            launch_hermite_sums(backend.context, prepared, h, ao, sums, self.shape[1], y)
        backend.context.pool.release(buffer)

    def add_up(self, group):
        """Replaces Y by that of all members of a `md4.gpu.collectives.Group`."""
        group.add_up((self.y,))

    def expect_result(self):
        """Makes host memory for the result while the device is at work."""
        self.host = written_array(self.shape)

    def result(self):
        """Y on the host."""
        if self.host is None:
            self.expect_result()
        copy_to_host(self.host, self.y.pointer, self.backend.context.stream)
        self.backend.context.pool.release(self.buffer)
        return self.host
