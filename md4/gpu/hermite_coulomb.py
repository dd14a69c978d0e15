"""J in the Hermite basis on the GPU: densities and sums of pair lists in device memory.

See `md4.method.hermite_coulomb`.
"""

import numpy as np

from md4.gpu.buffers import Buffer, clear, copy_to_device, copy_to_host, written_array
from md4.gpu.h_layout import KET_BLOCKS
from md4.gpu.kernels.coulomb_threads import by_threads, in_single, launch_quartets
from md4.gpu.kernels.hermite_coulomb import (
    hermite_width,
    launch_contraction,
    launch_hermite_densities,
    launch_hermite_sums,
)
from md4.gpu.kernels.narrow import launch_narrow
from md4.gpu.kernels.primitive_quartets import LARGEST_SINGLE, extent, fits_single
from md4.gpu.pair_order import PairOrder
from md4.gpu.tuning import HERMITE_COULOMB, r_stride
from md4.plan import chunks, part_of


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
        self.host = self.rule = None
        self.orders, self.singles, self.extent = {}, {}, None

    def screen_by(self, rule):
        """`take_rows` asks which quartets survive by a `md4.plan.QuartetRule`."""
        self.rule, self.fits = rule, bool(rule.own.max(initial=0.0) <= LARGEST_SINGLE)

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
        if self.rule.tolerance > 0 and self.fits and in_single(prepared.facts.l, 0) and prepared.nprim:
            self.narrow(prepared)

    def narrow(self, prepared):
        """D_q of a whole list in FP32: before tracks begin, since all of them may read it."""
        size = prepared.nprim * hermite_width(prepared.pairs)
        room, found = self.backend.context.pool.get(max(1, self.shape[0] * size // 2)), []
        for n, density in enumerate(self.densities(prepared)):
            half = room.part(n * size // 2, (size // 2,))  # `size` is a multiple of 8
            found.append(Buffer(half.pointer, (size,), 4, half.owner))
            launch_narrow(self.backend.context, density, found[-1])
        self.singles[prepared] = room, found

    def take_rows(self, rows, part, parts):
        """Adds the quartets of a `md4.plan.QuartetRows` that survive, or one of several parts, if L is small; is it?"""
        bra, ket, l = rows.bra, rows.ket, (rows.bra.facts.l, rows.ket.facts.l)
        if not by_threads(max(l), min(l)):
            return False
        survive = int(rows.counts.sum(dtype=np.int64))
        if bra.nprim == 0 or ket.nprim == 0 or survive == 0:
            return True
        orders = [self.order(side, first) for side, first in zip((bra, ket), rows.places)]
        used, width = orders[0].end(len(rows.counts)), orders[1].end(int(rows.counts.max()))
        ends = self.part(rows, orders[0], used, part, parts), (0, width)
        filled = survive / (len(rows.counts) * int(rows.counts.max()))
        sides = [(bra, orders[0], ends[0]), (ket, orders[1], ends[1])]
        self.launch(sides if l[0] >= l[1] else sides[::-1], rows.same, filled)
        return True

    def order(self, prepared, first):
        """`PairOrder` of a list, which begins at the place `first` of the rule's tables."""
        if prepared not in self.orders:
            piece = slice(first, first + prepared.npair)
            self.orders[prepared] = PairOrder(
                self.backend.context, prepared, self.rule.bounds[piece], self.rule.own[piece]
            )
        return self.orders[prepared]

    def part(self, rows, order, used, part, parts):
        """First place and the one behind the last of a part of the bra primitives, `used` of which count at all."""
        if parts == 1:
            return 0, used
        counts = np.zeros(rows.bra.npair, dtype=np.int64)
        counts[: len(rows.counts)] = rows.counts
        return tuple(min(used, int(order.places[n])) for n in part_of(counts[order.pairs], part, parts))

    def launch(self, sides, triangle, filled):
        """All of one range of a list with all of another one, by (list, `PairOrder`, places) of each."""
        (ab, *_), (cd, *_) = sides
        if any(first == last for *_, (first, last) in sides):
            return
        backend, least = self.backend, self.rule.tolerance
        single = least > 0 and self.has_singles(ab.facts, cd.facts)
        limits = least, HERMITE_COULOMB.single_ratio * least if single else least
        for in_fp32 in (False, True) if single else (False,):
            densities = [(self.single_densities(side) if in_fp32 else self.densities(side)) for side, *_ in sides]
            for matrix in range(self.shape[0]):
                bra, ket = (
                    (*order.on_device, *ends, density[matrix], self.sides[side][1][matrix][1])
                    for (side, order, ends), density in zip(sides, densities)
                )
                launch_quartets(
                    backend.context, backend.operator, ab, cd, triangle, bra, ket, limits, filled, in_fp32
                )  # fmt: skip

    def has_singles(self, bra, ket):
        """Whether quartets of two lists, given by their `ListFacts`, may be computed in single precision."""
        if not in_single(bra.l, ket.l) or not self.fits:
            return False
        if self.extent is None:
            self.extent = extent(self.basis)
        return fits_single(self.extent, bra, ket)

    def densities(self, prepared):
        """D_q of a loaded list for each matrix."""
        return [density for density, _ in self.sides[prepared][1]]

    def single_densities(self, prepared):
        """The same in FP32, of a list for which `has_singles` may be true."""
        return self.singles[prepared][1]

    def add(self, ab, cd, triangle):
        """All of `ab` with all of `cd`, slices of lists that are loaded, of one list if `triangle`; for larger L."""
        if ab.facts.l < cd.facts.l:
            ab, cd = cd, ab
        if ab.nprim == 0 or cd.nprim == 0:
            return
        backend, sides = self.backend, list(zip(self.sides[ab.whole][1], self.sides[cd.whole][1]))
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
        others = [self.orders.pop(prepared).buffer] if prepared in self.orders else []
        others += [self.singles.pop(prepared)[0]] if prepared in self.singles else []
        for unused in (buffer, *others):
            backend.context.pool.release(unused)

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
