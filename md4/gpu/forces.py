"""Gradients on the GPU by reverse mode; the equations are those of `md4.cpu.gradient`.

    1.  U[cd, p] = sum_q H[cd, q] [q|p],     |p| <= l_ab + 1         steps 3 and 4 with the sides exchanged
    2.  Z[ab, p] = sum_cd Gamma[ab, cd] U[cd, p]                     `md4.gpu.kernels.reverse_sums`
    3.  dE/dA_i = sum_{ab,p} H^{A_i}[ab, p] Z[ab, p]                 `md4.gpu.kernels.pair_forces`

Step 1 takes the Hermite functions of each primitive bra pair as functions of a ket: no kernel of its own is needed. A
task is a piece of a bra list with all ket lists. The ket pairs that count with a bra pair are the first of their list,
whose bounds fall.
"""

from copy import copy
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.buffers import Buffer, words
from md4.gpu.hermite_coulomb import first_aos
from md4.gpu.kernels.pair_forces import launch_forces
from md4.gpu.kernels.recurrence import launch_r
from md4.gpu.kernels.reverse_sums import launch_reverse, reverse_tile
from md4.gpu.kernels.two_products import BEHIND, bra_form
from md4.gpu.paths import bra_launcher
from md4.gpu.r_layout import r_stride
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import CHUNK_BYTES, FEWEST_BLOCKS, REVERSE
from md4.method.angular import nherm
from md4.shells.shell_pairs import list_facts
from md4.support.display import size_text

# Shares of the memory that may be used: of H of the ket lists, and of Z of a task.
H_SHARE, Z_SHARE = 0.4, 0.2
# Most bytes of Z of a task; that of one bra pair may be larger.
Z_BYTES = 1 << 30
# Predicted seconds of a floating-point operation, and of what a task and a rectangle of two lists take besides.
OPERATION, TASK, RECTANGLE = 1 / 20e12, 1e-4, 5e-5


@cache
def hermite_facts(l):
    """`ListFacts` of the Hermite functions up to degree l of primitive pairs, each of which is a pair of its own."""
    return list_facts(l, 0, False, 1, 1, nherm(l), 1, 1, False)


def hermite_side(ab):
    """The primitive pairs of a slice of a prepared list as a ket of `hermite_facts`, of one degree more."""
    side = copy(ab)
    side.facts = hermite_facts(ab.facts.l + 1)
    return side


class Task(NamedTuple):
    """Bra pairs from `first` to `last` of a list, whose number it has, and their predicted seconds."""

    seconds: float
    number: int
    first: int
    last: int


class DeviceForces:
    """Derivatives of sums over all quartets by the centres of the shells; see `md4.cpu.forces.HostForces`.

    Parameters
    ----------
    backend : md4.gpu.backend.GpuBackend
    basis : md4.Basis
    lists : list of md4.contract.screening.PairList
    bounds : list of md4.shells.schwarz.GradientBounds
        Those of each list.
    """

    def __init__(self, backend, basis, lists, bounds):
        self.backend, self.basis, self.lists, self.bounds = backend, basis, lists, bounds

    def run(self, backend, densities, coulomb, exchange, tolerance, part=0, parts=1, report=None):
        """As `md4.cpu.forces.HostForces.run`."""
        context, shape = backend.context, densities.shape
        norms = self.norms(densities)
        self.check_memory(backend, densities)
        buffer, arrays = context.pool.upload([densities, coulomb, exchange], context.stream)
        terms = *(Buffer(this.pointer, (this.size,), 8, buffer) for this in arrays), shape[-1]
        found, left_out, quartets, done = np.zeros((self.basis.nshell, 3)), np.zeros(2), 0, []
        for batch in self.batches(backend):
            for task in self.tasks(backend, batch)[part::parts]:
                counts, without = self.counts(task, batch, norms, (coulomb, exchange), tolerance)
                quartets, left_out = quartets + int(counts.sum(dtype=np.int64)), left_out + without
                done.append((task, self.launch(backend, task, batch, counts, terms), backend.mark()))
                if len(done) > 1:  # the device is at work on the last one meanwhile
                    self.take(context, found, *done.pop(0), report)
            for one in done:
                self.take(context, found, *one, report)
            done = []
        context.pool.release(buffer)
        return found, quartets, left_out

    def norms(self, densities):
        """|D_ab| of blocks, shape (n, nshell, nshell), and the largest ones of a shell with those of each kind."""
        first = self.basis.ao_loc[:-1]
        squares = np.add.reduceat(np.add.reduceat(densities**2, first, axis=1), first, axis=2)
        norms, most = np.sqrt(squares), {}
        for kind in {kind for this in self.lists for kind in this.kinds}:
            shells = {shell for this in self.lists for of, column in zip(this.kinds, this.pairs.pairs.T) if of == kind
                      for shell in np.unique(column).tolist()}  # fmt: skip
            most[kind] = norms[:, :, sorted(shells)].max(axis=2)
        return norms, most

    def counts(self, task, batch, norms, factors, tolerance):
        """With how many ket pairs of each list of a batch the bra pairs count, and what is left out, as of `run`.

        The numbers have the shape (nket, task.last), int32; they are found by that of a bra pair in its whole list.
        """
        this, (norms, most), (coulomb, exchange) = self.lists[task.number], norms, factors
        a, b = this.pairs.pairs[task.first : task.last].T
        own = self.bounds[task.number].derivative[task.first : task.last]
        without, counts = np.zeros(2), np.zeros((len(batch), task.last), dtype=np.int32)
        for found, number in zip(counts[:, task.first :], batch):
            c, d = self.lists[number].kinds
            of_j = abs(coulomb)[:, None] * norms[:, a, b] * np.minimum(most[c].max(axis=1), most[d].max(axis=1))[:, None]
            of_k = 0.5 * abs(exchange)[:, None] * (
                most[c][:, a] * most[d][:, b] + most[d][:, a] * most[c][:, b]
            )  # fmt: skip
            size, bounds = own * (of_j + of_k).sum(axis=0), self.bounds[number]
            found[:] = bounds.survivors(size, tolerance)
            without += size @ bounds.sums[found], (size**2) @ bounds.squares[found]
        return counts, without

    def launch(self, backend, task, batch, counts, terms):
        """Has the device make the derivatives of a task, (nprim, 6)."""
        context, this = backend.context, self.lists[task.number].prepared[task.first : task.last]
        limits = self.sent(context, counts)
        tile, row_blocks, np8, z_parts = self.shape_of(this)
        rows = 8 * tile.rows8 * row_blocks
        out = context.pool.get(max(1, 6 * this.nprim))
        z = context.pool.room("z", max(1, z_parts * this.nprim * np8 * rows * 8))
        context.clear(z)
        sums = z, this.first_prim, this.nprim, rows, z_parts
        places = first_aos(context, this, self.basis)
        for n, number in enumerate(batch):
            ket = self.lists[number].prepared
            own, aos = limits.part(n * task.last, (task.last,)), (places, first_aos(context, ket, self.basis))
            for ab, cd in self.chunks(context, this, ket, counts[n][task.first :]):
                u = self.half_transformed(backend, ab, cd, own)
                launch_reverse(context, tile, row_blocks, aos, ab, cd, u, np8, own, terms, sums)
        launch_forces(context, this, this.facts.l + 1, sums, out)
        return out

    def half_transformed(self, backend, ab, cd, limits):
        """Step 1: U of a chunk, as (cd|p]."""
        context, side = backend.context, hermite_side(ab)
        r = context.pool.room("r", max(1, cd.nprim * side.nprim * r_stride(cd.facts.l + side.facts.l)))
        launch_r(context, backend.operator, cd, side, r, (limits, True))
        size = side.nprim * blocks_of_8(side.facts.nherm) * cd.npair * cd.facts.nab * 8
        u = context.pool.room("abq", size + BEHIND)
        if cd.nprim and side.nprim:
            form = bra_form(context.unit, cd.facts)
            launch = context.fixed(bra_launcher, cd.facts, side.facts)
            launch(context, cd.h(form).array, cd, side, r, u, (limits, True))
        return u

    def take(self, context, found, task, out, wait, report):
        """Adds the derivatives of a task to those of the shells, once the device has made them."""
        wait()
        pairs, values = self.lists[task.number].pairs, np.empty((out.size // 6, 6))
        context.copy_out(values, out.pointer)
        context.pool.release(out)
        counts = np.diff(pairs.start[task.first : task.last + 1])
        for shells, columns in zip(pairs.pairs[task.first : task.last].T, (slice(3), slice(3, 6))):
            np.add.at(found, np.repeat(shells, counts), values[: counts.sum(), columns])
        if report is not None:
            report(task.seconds)

    @staticmethod
    def sent(context, counts):
        """An int32 array in device memory."""
        room = context.pool.get(max(1, words(counts.nbytes)))
        context.copy_in(room.pointer, np.ascontiguousarray(counts))
        return Buffer(room.pointer, (counts.size,), 4, room)

    # sizes

    def shape_of(self, ab):
        """(tile, row blocks, blocks of 8 p, parts of the ket pairs) for bra pairs of a task."""
        np8 = blocks_of_8(nherm(ab.facts.l + 1))
        mean = max(1, round(ab.nprim / max(1, ab.npair)))
        tile, row_blocks = reverse_tile(ab.facts.nab, mean * np8)
        blocks = ab.npair * row_blocks * -(-mean * np8 // (tile.nt * tile.warps))
        return tile, row_blocks, np8, min(REVERSE.most_parts, -(-FEWEST_BLOCKS // max(1, blocks)))

    def chunks(self, context, bra, ket, counts):
        """Slices (ab, cd) of a rectangle whose r and U take at most `CHUNK_BYTES`, without ket pairs that never count.

        `counts` says with how many ket pairs each bra pair counts.
        """
        np8, l = blocks_of_8(nherm(bra.facts.l + 1)), bra.facts.l + 1 + ket.facts.l
        budget = context.pool.share(CHUNK_BYTES) // 8
        start = bra.whole.pairs.start[bra.first : bra.first + bra.npair + 1]
        of_ket = ket.pairs.start
        most = int(counts.max(initial=0))

        def numbers(first, last):
            """Numbers of r and U of each primitive bra pair with the ket pairs from `first` to `last`."""
            return int(of_ket[last] - of_ket[first]) * r_stride(l) + (last - first) * ket.facts.nab * 8 * np8

        if most == 0 or bra.nprim == 0 or of_ket[most] == 0:
            return
        pieces = -(-numbers(0, most) * min(bra.nprim, REVERSE.few_prims) // budget)
        edges = np.unique(np.linspace(0, most, min(most, pieces) + 1).astype(int)).tolist()
        for first, last in pairwise(edges):
            room = max(1, budget // max(1, numbers(first, last)))
            at = 0
            while at < bra.npair:
                end = int(np.searchsorted(start, start[at] + room, side="right")) - 1
                end = min(max(end, at + 1), bra.npair)
                highest = min(last, int(counts[at:end].max()))
                if highest > first and start[end] > start[at] and of_ket[highest] > of_ket[first]:
                    yield bra[at:end], ket[first:highest]
                at = end

    def batches(self, backend):
        """Numbers of ket lists whose H matrices fit the memory at the same time, a batch after the other."""
        room, batch, used = H_SHARE * backend.memory_left(), [], 0
        for number, this in enumerate(self.lists):
            need = backend.hermite_bytes(this.pairs)
            if batch and used + need > room:
                yield batch
                for done in batch:
                    self.lists[done].prepared.drop()
                batch, used = [], 0
            batch.append(number)
            used += need
        if batch:
            yield batch

    def tasks(self, backend, batch):
        """Every `Task`, those of most work first."""
        room, found = min(Z_BYTES, Z_SHARE * backend.memory_left()), []
        for number, this in enumerate(self.lists):
            tile, row_blocks, np8, parts = self.shape_of(this.prepared)
            per_prim = 8 * parts * np8 * 64 * tile.rows8 * row_blocks
            start, edges = this.pairs.start, [0]
            while edges[-1] < len(this):
                end = int(np.searchsorted(start, start[edges[-1]] + max(1, room // per_prim), side="right")) - 1
                edges.append(min(max(end, edges[-1] + 1), len(this)))
            seconds = self.seconds_of(this, batch) / max(1, len(this))
            found += [Task((last - first) * seconds, number, first, last) for first, last in pairwise(edges)]
        return sorted(found, reverse=True)

    def seconds_of(self, this, batch):
        """Predicted seconds of a bra list with some ket lists, without screening."""
        bra, np_, total = this.pairs, nherm(this.pairs.l + 1), TASK
        for number in batch:
            ket = self.lists[number].pairs
            step = ket.nprim * (ket.nherm * ket.nab + 20 * nherm(ket.l + bra.l + 1)) + bra.nab * ket.nab * len(ket)
            total += RECTANGLE + OPERATION * 2 * bra.nprim * np_ * step
        return total

    def seconds(self):
        """Predicted seconds, without screening."""
        every = range(len(self.lists))
        return sum(self.seconds_of(this, every) for this in self.lists)

    def check_memory(self, backend, densities):
        """MemoryLimitError, before anything is allocated, if there is no room for the least task."""
        l = max(this.pairs.l for this in self.lists)
        most = max(this.pairs.max_prim for this in self.lists)
        nab = max(8 * blocks_of_8(this.pairs.nab) for this in self.lists)
        np8 = blocks_of_8(nherm(l + 1))
        least = 8 * most * (np8 * 8 * nab * (REVERSE.most_parts + 1) + most * r_stride(2 * l + 1))
        whole = least + densities.nbytes + max(backend.hermite_bytes(this.pairs) for this in self.lists)
        if whole > backend.memory_left():
            raise MemoryLimitError(
                f"gradients of {self.basis!r} take at least {size_text(whole)} (densities, H matrices of one list and "
                f"Z of one shell pair), but {size_text(backend.memory_left())} may be used; raise max_memory."
            )
