"""Gradients on the GPU by reverse mode; the equations are those of `md4.cpu.gradient`.

    1.  U[cd, p] = sum_q H[cd, q] [q|p],     |p| <= l_ab + 1         steps 3 and 4 with the sides exchanged
    2.  Z[ab, p] = sum_cd Gamma[ab, cd] U[cd, p]                     summed over all kets of a bra pair
    3.  dE/dA_i = sum_{ab,p} H^{A_i}[ab, p] Z[ab, p]                 `md4.gpu.kernels.pair_forces`

The Hermite functions of a primitive bra pair are functions of a ket in step 1. A task is a piece of a bra list with all
ket lists. First the device counts the ket pairs that count with each bra pair (`md4.gpu.kernels.select_kets`). Then

- `md4.gpu.kernels.reverse_lanes` does steps 1 and 2 for lists of these, of small and middle classes;
- `md4.gpu.kernels.reverse_fused` does so on tensor cores, for middle classes;
- for large classes step 1 is that of integrals, with U in memory, and step 2 is `md4.gpu.kernels.reverse_sums`. These
  take rectangles: with each bra pair all ket pairs up to the last one that counts, whose bounds fall.

In a molecule in a plane the latter two take even and odd functions apart (`md4.gpu.force_planes`).

J alone needs neither Gamma nor U (`md4.gpu.coulomb_forces`). In large molecules it is made apart from exchange.
"""

from collections import Counter
from contextlib import contextmanager
from functools import cached_property
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.buffers import Buffer, words, written_array
from md4.gpu.coulomb_forces import CoulombBounds, CoulombForces, apart_from_exchange
from md4.gpu.dealing import Dealer
from md4.gpu.force_planes import Plane, plane_of
from md4.gpu.force_tasks import ForceTasks
from md4.gpu.h_layout import BRA_SINGLES, BRA_TURNED
from md4.gpu.hermite_coulomb import first_aos
from md4.gpu.kernels.density_blocks import launch_density_blocks
from md4.gpu.kernels.gamma_blocks import gamma_numbers, gamma_size, launch_gamma, launch_gamma_of_table
from md4.gpu.kernels.pair_forces import launch_forces
from md4.gpu.kernels.primitive_quartets import extent
from md4.gpu.kernels.recurrence import launch_listed_r, launch_r
from md4.gpu.kernels.reverse_fused import launch_reverse_fused
from md4.gpu.kernels.reverse_lanes import launch_reverse_lanes
from md4.gpu.kernels.reverse_sums import launch_reverse, reverse_tile
from md4.gpu.kernels.select_kets import (
    QuartetTable,
    count_sizes,
    excess_of,
    largest_norms,
    launch_select,
    packed_prims,
    packed_shells,
    tails_of,
)
from md4.gpu.kernels.two_products import BEHIND, bra_form
from md4.gpu.paths import bra_launcher
from md4.gpu.r_layout import r_stride_of
from md4.gpu.reverse_ways import Listed, TaskSums, Way, chunks, columns, hermite_side, part_of, parts_of
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import CHUNK_BYTES, REVERSE
from md4.plan import groups_within

# Most bytes of the numbers of ket pairs, and of first quartets, of tasks that count together.
COUNT_BYTES = 1 << 28
# Where Gamma may be single: its largest elements, what each element may lose where numbers underflow, with H that is as
# small or large as the least and the largest one, and how many terms it may have, whose sum is rounded for each.
LARGEST_GAMMA, LEAST_GAMMA, MOST_SINGLE_TERMS = 1e12, 1e-29, 1 << 10


class Terms(NamedTuple):
    """What Gamma and its bounds are made of, in device memory.

    Attributes
    ----------
    densities, norms : tuple
        Fields of `md4.gpu.kernels.reverse_sums.Densities` and `md4.gpu.kernels.select_kets.Norms`.
    of_pairs : Buffer
        `md4.gpu.kernels.select_kets.BoundedPairs.norms`.
    plane : md4.gpu.force_planes.Plane or None
    with_j : bool
        Whether a factor j is not zero.
    blocks : tuple
        The same densities by blocks of shells, in FP64 and in FP32 (`md4.gpu.kernels.density_blocks`).
    single : float
        Shell quartets are single if the bounds of their primitive quartets add up to less.
    by_table : bool
        Whether Gamma is in a table; see `md4.gpu.fitting_forces.TableTerms`.
    """

    densities: tuple
    norms: tuple
    of_pairs: Buffer
    plane: Plane | None
    with_j: bool
    blocks: tuple
    single: float

    by_table = False

    def gamma_of(self, bra, ket):
        """What Gamma of two lists, given by their numbers, is made of."""
        return self.densities


class Counts(NamedTuple):
    """How many of each ket list count with the bra pairs of a task.

    Attributes
    ----------
    pairs : ndarray, shape (nlist, npair, 3)
        For each bra pair, how many ket pairs not in single quartets, how many in these, and the end of the last one.
    prims : ndarray, shape (nlist, nprim, 2)
        For each primitive bra pair, how many primitive ket pairs not in single quartets, and in these.
    of_warps : Buffer
        Of all lists; see `md4.gpu.kernels.select_kets.KetCounts`.
    first : Buffer of int64
        Room for `md4.gpu.kernels.select_kets.QuartetTable.first` and `first_quartets` of all lists.
    """

    pairs: np.ndarray
    prims: np.ndarray
    of_warps: Buffer
    first: Buffer


def limit_of(way, tolerance):
    """The bound below which primitive quartets are left out of the shell quartets that count, by a `Way`.

    Where quartets are listed it is that of shell quartets, else none are left out.
    """
    return tolerance if way.listed else 0.0


def single_limit(norms, coulomb, exchange, tolerance, bound):
    """`Terms.single`; 0 where FP32 may not have the range of densities, factors and Gamma, or the digits of their sum.

    `bound`: the largest one of a quartet without densities. What underflows, relative to densities and factors of 1 or
    more, may add so many times the least number to a force.
    """
    # numbers that are no numbers stay so, and do not fit; products of Python's floats tell nothing of overflow
    of_d, *factors, bound = (
        float(np.maximum(1.0, abs(np.asarray(of)).max(initial=0.0))) for of in (norms, coulomb, exchange, bound)
    )  # fmt: skip
    largest = of_d * of_d * float(np.maximum(*factors))
    fits = largest <= LARGEST_GAMMA and LEAST_GAMMA * largest * bound <= tolerance
    return REVERSE.single_ratio * tolerance if fits and len(coulomb) <= MOST_SINGLE_TERMS else 0.0


def kind_of(table, listed, single):
    """The part of a `QuartetTable` with those quartets that are single, or with all others."""
    both = listed.shells, listed.quartets
    of_shells, of_quartets = ((counts[0] if single else 0, (counts[single],)) for counts in both)
    own = {name: getattr(table, name).part(*of_shells) for name in ("bra", "ket")}
    own |= {name: getattr(table, name).part(*of_quartets) for name in ("ket_prims", "shells")}
    if table.bra_prims.size:
        own["bra_prims"] = table.bra_prims.part(*of_quartets)
    every = table.first_quartets
    return table._replace(first_quartets=every.part(int(single), (every.size - single,)), **own)


def reordered(order, *arrays):
    """Arrays of terms in an order, without a copy if that is theirs."""
    return arrays if (np.diff(order) > 0).all() else [array[order] for array in arrays]


class DeviceForces(ForceTasks, CoulombBounds):
    """Derivatives of sums over all quartets by the centres of the shells; see `md4.cpu.forces.HostForces`.

    Parameters
    ----------
    basis, lists, beside
        As of `ForceTasks`.
    bounds, of_prims
        As of `CoulombBounds`.
    """

    def __init__(self, basis, lists, bounds, of_prims, beside=()):
        super().__init__(basis, lists, beside)
        self.bounds, self.of_prims, self.tables, self.ways = bounds, of_prims, None, {}
        # where each list begins in the pairs, and in the primitive pairs, of all lists
        self.begin = np.cumsum([0, *map(len, lists)]).tolist()
        self.begin_prims = np.cumsum([0, *(this.pairs.nprim for this in lists)]).tolist()
        # for derivatives of a task, and for where its quartets begin
        self.host, self.first_numbers = np.zeros(0), np.zeros(0, dtype=np.int64)

    def run(
        self, backend, densities, norms, coulomb, exchange, tolerance, part=0, parts=1, report=None, meanwhile=None
    ):  # fmt: skip
        """As `md4.cpu.forces.HostForces.run`."""
        found, with_k = np.zeros((self.basis.nshell, 3)), exchange != 0
        # J of these is made apart, the other terms are made together
        alone = self.alone(norms, coulomb, exchange, tolerance)
        rest = with_k | (coulomb != 0) & ~alone
        order, quartets, left_out = np.argsort(rest, kind="stable"), 0, np.zeros(2)
        densities, norms, exchange = reordered(order, densities, norms, exchange)
        of_alone, of_rest = reordered(order, np.where(alone, coulomb, 0.0), np.where(alone, 0.0, coulomb))
        context, first, size = backend.context, int(np.count_nonzero(~rest)), self.basis.nao**2
        others = [these[first:] for these in (norms, of_rest, exchange)]
        plane, for_plane = self.plane(densities[first:], *others, tolerance)
        if rest.any():
            self.check_memory(backend, densities, plane)
        if of_alone.any():
            self.check_memory_for_coulomb(backend, densities.nbytes)
        d = context.pool.get(max(1, densities.size))
        context.copy_in(d.pointer, np.ascontiguousarray(densities))
        of_each = [(d.part(n * size, (size,)), norms[n], j) for n, j in enumerate(of_alone.tolist()) if j]
        of_j = CoulombForces(self, backend, of_each, tolerance, part, parts, found)
        if rest.any():
            here = d.part(first * size, (densities.size - first * size,))
            terms, buffers = self.terms(backend, here, plane, *others, tolerance)
            every = range(len(self.lists))
            quartets, left_out = self.add(backend, every, every, terms, found, part, parts, report, of_j, meanwhile)
            left_out += for_plane  # by each part, since nothing says that all have left it out
            for buffer in buffers:
                context.pool.release(buffer)
        elif meanwhile is not None:
            of_j.begin(None)
            meanwhile()
        of_j.end()
        context.pool.release(d)
        if report is not None and not rest.any():
            report(self.seconds() / parts)
        return found, quartets + of_j.quartets, left_out + of_j.left_out

    @cached_property
    def extent(self):
        """The `Extent` of the basis, or None where no quartet is single, as those of a table of Gamma."""
        return extent(self.basis)

    @cached_property
    def largest_bound(self):
        """That of a quartet without densities."""
        own, derivative = (
            float(np.max([getattr(of, name).max(initial=0.0) for of in self.bounds])) for name in ("own", "derivative")
        )  # fmt: skip
        return own * derivative

    @cached_property
    def apart(self):
        """See `md4.gpu.coulomb_forces.apart_from_exchange`."""
        return apart_from_exchange(self.basis)

    def alone(self, norms, coulomb, exchange, tolerance):
        """Of which densities J is made apart from exchange, shape (n,)."""
        if exchange.any() and not self.apart:
            return np.zeros(len(coulomb), dtype=bool)
        of_each = zip(norms, np.sqrt(abs(coulomb)))
        return np.array([root > 0 and self.has_digits(these, root, tolerance) for these, root in of_each], dtype=bool)

    def passes(self, norms, coulomb, exchange, tolerance):
        """How often `run` goes through all quartets: once for exchange, and once for each density with J apart."""
        alone = self.alone(norms, coulomb, exchange, tolerance)
        return int(alone.sum()) + bool(((exchange != 0) | (coulomb != 0) & ~alone).any())

    def plane(self, densities, norms, coulomb, exchange, tolerance):
        """As `plane_of`."""
        pairs = [this.pairs.pairs for this in self.lists]
        return plane_of(self.basis, pairs, self.bounds, densities, norms, coulomb, exchange, tolerance)

    def terms(self, backend, d, plane, norms, coulomb, exchange, tolerance):
        """(`Terms`, buffers to give back after them) of the densities `d` on the device, with their `block_norms`."""
        context, functions = backend.context, np.diff(self.basis.ao_loc)
        with_j, single = bool(coulomb.any()), single_limit(norms, coulomb, exchange, tolerance, self.largest_bound)
        of_pairs = norms[:, self.shells[:, 0], self.shells[:, 1]] if with_j else np.zeros(0)
        of_aos = (np.repeat(numbers, functions) for numbers in (self.basis.ao_loc[:-1], functions))
        given = norms, largest_norms(norms), coulomb, exchange, of_pairs, *of_aos
        buffer, arrays = context.pool.upload(given, context.stream)
        norms, largest, j, k, of_pairs, *of_aos = (array.part(0, (array.size,)) for array in arrays)
        room = context.pool.get(d.size + words(4 * d.size))
        blocks, singles = room.part(0, (d.size,)), Buffer(room.pointer + 8 * d.size, (d.size,), 4, room.owner)
        launch_density_blocks(context, d, *of_aos, blocks, singles)
        blocks = tuple((numbers, j, k, self.basis.nao) for numbers in (blocks, singles))
        of_bounds = norms, largest, j, k, self.basis.nshell, tolerance
        return Terms((d, j, k, self.basis.nao), of_bounds, of_pairs, plane, with_j, blocks, single), (buffer, room)

    def add(self, backend, bras, kets, terms, found, part, parts, report=None, of_j=None, meanwhile=None):
        """Adds the derivatives of lists `bras` with lists `kets` to those of the shells.

        While the device is at work, the `CoulombForces` are begun and added, if there are any, and `meanwhile` is
        called once.

        Returns
        -------
        quartets : int
        left_out : ndarray, shape (2,)
        """
        context, quartets, left_out, tracks = backend.context, 0, np.zeros(2), backend.tracks()
        few = self.working_tracks(tracks, bras, kets, terms.plane)
        for batch in self.batches(backend, kets):
            made, before, limits = [], 0.0, self.limits(context, bras, batch, terms)
            every = self.tasks(backend, bras, batch, part, parts, terms.plane)
            for tasks in self.counted_together(every, batch, context.pool.share(COUNT_BYTES)):
                numbers, without = self.count(tracks, tasks, batch, terms, limits, of_j)
                left_out += without
                # now the device has done all that it was given before
                if report is not None and before:
                    report(before)
                before = sum(task.seconds for task in tasks)
                outs, done, made = self.outs(context, tasks), made, []
                with self.dealt(few, tasks) as dealt:
                    for (here, task), counts, out in zip(dealt, numbers, outs):
                        quartets += self.launch(here, task, batch, counts, terms, limits[task.number], context, out)
                        made.append((task, out, backend.mark()))
                self.take(context, found, done)
                if meanwhile is not None:
                    meanwhile()
                if of_j is not None:
                    of_j.take()
                of_j = meanwhile = None
            self.take(context, found, made)
            if report is not None and made:
                report(before)
        return quartets, left_out

    @staticmethod
    @contextmanager
    def dealt(backends, tasks):
        """Within it all tracks work, and each task, in their order, comes with the backend that has least to do."""
        tracks = backends[0].context.tracks
        tracks.begin(len(backends))
        try:
            yield ((backends[track], task) for track, task in Dealer(len(backends), inf).deal(tasks))
        finally:
            tracks.end()

    def outs(self, context, tasks):
        """Room for the derivatives of each task, (6, nprim)."""
        return [context.pool.get(max(1, 6 * self.sizes(task)[1])) for task in tasks]

    def bounded(self, context, terms):
        """Fields of `md4.gpu.kernels.select_kets.BoundedPairs` as bras and as kets, and where each list begins.

        Bounds are kept in device memory.
        """
        if self.tables is None:
            tails, every = [tails_of(bounds.own) for bounds in self.bounds], [this.pairs for this in self.lists]
            prims = np.concatenate([
                packed_prims(pairs.start, [excess_of(pairs.start, getattr(of, name), getattr(of_prims, name))
                                           for name in ("own", "derivative")])
                for pairs, of, of_prims in zip(every, self.bounds, self.of_prims)
            ])  # fmt: skip
            own, derivative = (
                [np.concatenate([getattr(this, name) for this in of]) for of in (self.bounds, self.of_prims)]
                for name in ("own", "derivative")
            )  # fmt: skip
            begins = np.stack([self.begin, np.cumsum([0, *map(len, tails)]), self.begin_prims], axis=1)
            arrays = [packed_shells(self.shells), prims, *derivative, *own, np.concatenate(tails), begins]
            self.tables = context.pool.upload(arrays, context.stream)[1]
        shells, prims, *both, tails, begins = self.tables
        bra, ket = ((shells, prims, *of_side, tails, terms.of_pairs) for of_side in (both[:2], both[2:]))
        return bra, ket, begins

    def first_pair(self, number, first):
        """Fields of `md4.gpu.kernels.select_kets.FirstPair` for a pair of a list."""
        return self.begin[number] + first, self.begin[number], self.begin_prims[number]

    def sizes(self, task):
        """Pairs of a task, and their primitive pairs."""
        start = self.lists[task.number].pairs.start
        return task.last - task.first, int(start[task.last] - start[task.first])

    def limits(self, context, bras, batch, terms):
        """For each bra list, by its number: `limit_of` it and each ket list, and below which bound quartets are single.

        They are in device memory until the next call.
        """
        limits = np.zeros((len(bras), len(batch), 2))
        for (n, bra), (m, ket) in product(enumerate(bras), enumerate(batch)):
            way = self.way(context, bra, ket, terms.plane)
            limits[n, m, 0] = limit_of(way, terms.norms[-1])
            if way.singles:
                limits[n, m, 1] = terms.single
        room, nket = context.pool.room("primitive limits", limits.size), len(batch)
        context.copy_in(room.pointer, limits)
        return {number: room.part(2 * nket * n, (nket, 2)) for n, number in enumerate(bras)}

    def counted_together(self, tasks, batch, most):
        """Successive tasks, whose counts take so many bytes at most; a large task is alone."""
        needs = [
            len(batch) * (4 * sum(count_sizes(*self.sizes(task))) + 8 * self.first_width(task)) for task in tasks
        ]  # fmt: skip
        return [tasks[group.start : group.stop] for group in groups_within(needs, most)]

    def count(self, backends, tasks, batch, terms, limits, of_j=None):
        """What counts of each list of a batch with the bra pairs of tasks, which are dealt to tracks.

        The `CoulombForces` are begun while the device counts, so that it has work while the host reads the counts.

        Parameters
        ----------
        limits : dict
            What `limits` returns.

        Returns
        -------
        counts : list of Counts
            Of each task.
        left_out : ndarray, shape (2,)
            As of `run`.
        """
        context, nlist = backends[0].context, len(batch)
        bra, ket, begins = self.bounded(context, terms)
        kets, sizes = begins.part(3 * batch[0], (nlist + 1, 3)), [self.sizes(task) for task in tasks]
        needs = [(*(nlist * n for n in count_sizes(*size)), nlist * self.first_width(task), 2 * size[0])
                 for task, size in zip(tasks, sizes)]  # fmt: skip
        edges = np.cumsum([(0, 0, 0, 0), *needs], axis=0).tolist()
        of_numbers, of_warps, of_first, of_sums = edges[-1]
        numbers, left_out = np.empty(of_numbers, dtype=np.int32), np.empty(of_sums)
        sums, first = context.pool.room("left out", of_sums), context.pool.room("first quartets", of_first)
        room, counts = context.pool.room("ket counts", words(4 * (of_numbers + of_warps))), []
        beside = context.beside_now()  # before the device counts
        with self.dealt(backends, tasks) as dealt:
            for (backend, task), size, need, at in zip(dealt, sizes, needs, edges):
                parts = zip((at[0], of_numbers + at[1]), need)
                one, own = (Buffer(room.pointer + 4 * begin, (count,), 4, room.owner) for begin, count in parts)
                most, npair = self.lists[task.number].prepared.facts.max_prim, size[0]
                launch_select(
                    backend.context, self.first_pair(task.number, task.first), *size, most, bra, ket, kets,
                    limits[task.number], terms.norms, terms.with_j, (one, own, sums.part(at[3], (need[3],))),
                    by_table=terms.by_table,
                )  # fmt: skip
                found = numbers[at[0] : at[0] + need[0]].reshape(nlist, -1)
                of_pairs, of_prims = found[:, : 3 * npair], found[:, 3 * npair :]
                of_pairs, of_prims = of_pairs.reshape(nlist, npair, 3), of_prims.reshape(nlist, -1, 2)
                counts.append(Counts(of_pairs, of_prims, own, first.part(at[2], (need[2],))))
        counted = backends[0].mark()
        # while the device counts: the system gives pages at the first write
        numbers.fill(0)
        left_out.fill(0.0)
        if of_j is not None:
            of_j.begin(beside)
        counted()
        context.beside.copy_out(numbers, room.pointer)
        context.beside.copy_out(left_out, sums.pointer)
        if context.dry:  # as if all of them counted
            for task, (pairs, prims, *_) in zip(tasks, counts):
                for n, number in enumerate(batch):
                    kinds = 1, bool(self.way(context, task.number, number, terms.plane).singles)
                    pairs[n] = np.multiply((*kinds, 1), len(self.lists[number]))
                    prims[n] = np.multiply(kinds, self.lists[number].pairs.nprim)
        of_tasks = [left_out[at[3] : at[3] + need[3]].reshape(2, -1).sum(axis=1) for at, need in zip(edges, needs)]
        return counts, sum(of_tasks, np.zeros(2))

    def way(self, context, bra, ket, plane):
        """`Way` of two lists, given by their numbers."""
        if plane not in self.ways:
            every = [this.prepared for this in self.lists]
            self.ways[plane] = {} if self.extent is None else self.ways_of(context, every, plane)
        found = self.ways[plane]
        if (bra, ket) not in found:
            found[bra, ket] = Way.of(context, *(self.lists[number].prepared for number in (bra, ket)), plane)
        return found[bra, ket]

    def ways_of(self, context, lists, plane):
        """Every `Way`, by the numbers of both lists, with `singles` where these are worth the variants that they take.
        """
        found, both, seconds, every = {}, {}, Counter(), 0.0
        for (n, bra), (m, ket) in product(enumerate(lists), repeat=2):
            found[n, m] = way = Way.of(context, bra, ket, plane)
            every += (taken := way.seconds * bra.nprim * ket.nprim)
            if way.fused:
                both[n, m] = way.with_singles(context, self.extent, bra.facts, ket.facts)
                for variant in {plan.variant for plan in both[n, m].singles}:
                    seconds[variant] += taken
        least = max(REVERSE.single_seconds, REVERSE.single_share * every)
        worth = {variant for variant, taken in seconds.items() if taken >= least}
        if sum(seconds[variant] for variant in worth) < REVERSE.single_variants * least:
            return found
        return found | {key: way for key, way in both.items() if {plan.variant for plan in way.singles} <= worth}

    def first_width(self, task):
        """Numbers of `QuartetTable.first` and `first_quartets` of a task with a list."""
        npair, nprim = self.sizes(task)
        return 3 * npair + 2 * nprim + 5

    def launch(self, backend, task, batch, counts, terms, limits, engine, out):
        """Has a track make the derivatives of a task, (6, nprim) into `out`; how many quartets are made.

        `limits`: those of its list. `engine`: the context of the engine. Its pool is asked for a share for each list,
        since Z and H are there by then.
        """
        context, this, made = backend.context, self.lists[task.number].prepared[task.first : task.last], 0
        sums = {}
        shells, width = 3 * len(this) + 3, self.first_width(task)
        if self.first_numbers.size < len(batch) * width:
            self.first_numbers = np.zeros(len(batch) * width, dtype=np.int64)
        numbers = self.first_numbers[: len(batch) * width].reshape(len(batch), width)
        pairs, quartets = (part.reshape(len(batch), -1, n) for part, n in zip(np.split(numbers, [shells], 1), (3, 2)))
        pairs[:, 0, :2], pairs[:, -1, 2], quartets[:, 0] = 0, 0, 0
        np.cumsum(counts.pairs[:, :, :2], axis=1, out=pairs[:, 1:, :2])
        np.cumsum(counts.prims, axis=1, out=quartets[:, 1:])
        pairs[:, :-1, 2] = counts.pairs[:, :, 2]
        # not in the order of the track, whose earlier tasks the host would wait for
        on_device = counts.first
        engine.beside.copy_in(on_device.pointer, numbers)
        engine.beside.stream.synchronize()
        totals = zip(*(some.tolist() for some in (pairs[:, -1, :2], quartets[:, -1], counts.prims.max(1, initial=0))))
        of_list = counts.of_warps.size // len(batch)
        for n, (number, of_quartets) in enumerate(zip(batch, totals)):
            way, budget = self.way(context, task.number, number, terms.plane), engine.pool.share(CHUNK_BYTES)
            for meeting in way.meetings:
                if meeting.parity not in sums:
                    sums[meeting.parity] = TaskSums(context, part_of(this, meeting.bra), meeting.hermite)
            if way.listed:
                first = on_device.part(width * n, (len(this) + 1, 3))
                first_quartets = on_device.part(width * n + shells, (2 * this.nprim + 2,))
                of_warps = counts.of_warps.part(of_list * n, (of_list,))
                listed = Listed(*of_quartets, first, first_quartets, of_warps, limits.part(2 * n, (1, 2)))
                for ab, these in listed.slices(this, way, pairs[n, :, :2], quartets[n], budget):
                    self.add_lists(backend, task.number, ab, number, way, these, terms, sums)
                made += sum(listed.shells)
            else:
                made += self.add_rectangles(
                    backend, task, this, number, way, counts.pairs[n, :, 2], terms, sums, budget
                )  # fmt: skip
        for n, these in enumerate(sums.values()):
            launch_forces(context, these.ab, these.hermite, these.fields(1), these.used, out, n > 0)
        return made

    def add_lists(self, backend, bra, ab, ket, way, listed, terms, sums):
        """Adds to Z what ket pairs give bra pairs `ab` with which they are `listed`; both lists by their numbers."""
        context, in_lanes = backend.context, way.lanes is not None
        table = self.table(context, listed, not in_lanes)
        of_bra, of_ket, begins = self.bounded(context, terms)
        launch_select(
            context, self.first_pair(bra, ab.first), len(ab), ab.nprim, ab.facts.max_prim, of_bra, of_ket,
            begins.part(3 * ket, (2, 3)), listed.limit, terms.norms, terms.with_j,
            (table.bra, listed.of_warps, table.first), table, terms.by_table,
        )  # fmt: skip
        for single in (False, True):
            if listed.quartets[single]:
                self.add_kind(backend, bra, ab, ket, way, listed, kind_of(table, listed, single), terms, sums, single)

    def add_kind(self, backend, bra, ab, ket, way, listed, table, terms, sums, single):
        """As `add_lists` for the quartets of one kind, which are in the `table`."""
        context, cd, in_lanes = backend.context, self.lists[ket].prepared, way.lanes is not None
        shells, quartets, most = listed.shells[single], listed.quartets[single], listed.most[single]
        sizes = [gamma_size(one.bra, one.ket, in_lanes, single) for one in way.meetings]
        places = gamma_numbers(shells, sizes, in_lanes)
        gamma = context.pool.room("gamma", words(4 * places[-1]) if single else places[-1])
        parts, each = way.divided(most, quartets)
        fields = [sums[one.parity].fields(parts) for one in way.meetings]
        if terms.by_table:
            of_gamma = terms.gamma_of(bra, ket)
            launch_gamma_of_table(context, in_lanes, (table.bra, table.ket), ab, cd, of_gamma, gamma)
        else:
            aos = first_aos(context, ab, self.basis), first_aos(context, cd, self.basis)
            facts = [one[:2] for one in way.meetings]
            d = terms.blocks[single]
            launch_gamma(context, in_lanes, (table.bra, table.ket), aos, ab, cd, d, gamma, facts, single)
        kets = table.first_quartets, table.ket_prims, table.shells
        if in_lanes:
            (meeting,), (z,) = way.meetings, fields
            launch_reverse_lanes(
                context, backend.operator, way.lanes, ab, cd, gamma, shells, meeting.hermite, kets, z, parts, each
            )  # fmt: skip
            return
        r, of_prims = context.pool.room("r", quartets * way.r), (table.ket_prims, table.bra_prims)
        plans, form, nbytes = (way.singles, BRA_SINGLES, 4) if single else (way.fused, BRA_TURNED, 8)
        for meeting, plan, z, first in zip(way.meetings, plans, fields, places):
            one, other, hermite = part_of(ab, meeting.bra), part_of(cd, meeting.ket), meeting.hermite
            h = other.h(form).array
            if first == 0:
                side = hermite_side(ab, hermite)
                launch_listed_r(context, backend.operator, other, side, of_prims, quartets, r, single)
            here = Buffer(gamma.pointer + nbytes * first, (1,), 8, gamma.owner)
            launch_reverse_fused(context, plan, one, other, h, here, hermite, r, kets, z, parts, each)

    @staticmethod
    def table(context, listed, bra_prims):
        """`md4.gpu.kernels.select_kets.QuartetTable`, which is to be written, with `bra_prims` or without."""
        shells, quartets = sum(listed.shells), sum(listed.quartets)
        counts = shells, shells, quartets if bra_prims else 0, quartets, quartets
        room = context.pool.room("quartets", sum(words(4 * count) for count in counts))
        fields, place = [listed.first, listed.first_quartets, listed.shells[0], listed.quartets[0]], room.pointer
        for count in counts:
            fields.append(Buffer(place, (count,), 4, room.owner))
            place += 8 * words(4 * count)
        return QuartetTable(*fields)

    def add_rectangles(self, backend, task, this, number, way, counts, terms, sums, budget):
        """Adds to Z what all ket pairs of a list give up to the last one that counts; how many quartets these are."""
        context, ket, limits = backend.context, self.lists[number].prepared, np.zeros(task.last, dtype=np.int32)
        limits[task.first :] = counts
        on_device = self.sent(context, limits)
        aos = first_aos(context, this, self.basis), first_aos(context, ket, self.basis)
        gamma = terms.gamma_of(task.number, number)
        for meeting in way.meetings:
            hermite, bra, z = meeting.hermite, part_of(this, meeting.bra), sums[meeting.parity]
            tile, row_blocks = reverse_tile(bra.facts.nab, columns(bra, hermite))
            np8, parts = blocks_of_8(hermite.nherm), parts_of(bra, hermite)
            for ab, cd in chunks(bra, part_of(ket, meeting.ket), hermite, counts, budget):
                u = self.half_transformed(backend, ab, cd, hermite, on_device)
                launch_reverse(
                    context, tile, row_blocks, aos, ab, cd, u, np8, on_device, gamma, z.fields(parts), parts,
                    terms.by_table,
                )  # fmt: skip
        return int(counts.sum(dtype=np.int64))

    def half_transformed(self, backend, ab, cd, hermite, limits):
        """Step 1: U of a chunk, as (cd|p], of the functions `hermite`."""
        context, side = backend.context, hermite_side(ab, hermite)
        h = cd.h(bra_form(context.unit, cd.facts)).array
        r, u = self.rooms(context.pool, {
            "r": max(1, cd.nprim * side.nprim * r_stride_of(cd.facts, side.facts)),
            "abq": side.nprim * blocks_of_8(side.facts.nherm) * cd.npair * cd.facts.nab * 8 + BEHIND,
        })  # fmt: skip
        launch_r(context, backend.operator, cd, side, r, (limits, True))
        launch = context.fixed(bra_launcher, cd.facts, side.facts)
        launch(context, h, cd, side, r, u, (limits, True))
        return u

    @staticmethod
    def rooms(pool, sizes):
        """`Pool.room` of several names; what they have of earlier chunks is given back where it leaves no room."""
        try:
            return [pool.room(name, items) for name, items in sizes.items()]
        except MemoryLimitError:
            pass  # only now is the memory free that the exception's frames referred to
        pool.trim()
        return [pool.room(name, items) for name, items in sizes.items()]

    def take(self, context, found, made):
        """Adds the derivatives that the device has `made`, or makes, to those of the shells, a task after the other."""
        most = max((out.size for _, out, _ in made), default=0)
        if self.host.size < most:
            self.host = written_array(most)
        for task, out, wait in made:
            pairs, values = self.lists[task.number].pairs, self.host[: out.size - out.size % 6].reshape(6, -1)
            wait()
            context.beside.copy_out(values, out.pointer)
            context.pool.release(out)
            counts = np.diff(pairs.start[task.first : task.last + 1])
            for side, shells in enumerate(pairs.pairs[task.first : task.last].T):
                owner = np.repeat(shells, counts)
                for axis in range(3):
                    found[:, axis] += np.bincount(owner, values[3 * side + axis, : len(owner)], len(found))

    @staticmethod
    def sent(context, counts):
        """An int32 array in device memory, until the next one."""
        room = context.pool.room("ket limits", max(1, words(counts.nbytes)))
        context.copy_in_pieces(room.pointer, counts)
        return Buffer(room.pointer, (counts.size,), 4, room)
