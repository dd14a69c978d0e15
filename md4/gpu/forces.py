"""Gradients on the GPU by reverse mode; the equations are those of `md4.cpu.gradient`.

    1.  U[cd, p] = sum_q H[cd, q] [q|p],     |p| <= l_ab + 1         steps 3 and 4 with the sides exchanged
    2.  Z[ab, p] = sum_cd Gamma[ab, cd] U[cd, p]                     summed over all kets of a bra pair
    3.  dE/dA_i = sum_{ab,p} H^{A_i}[ab, p] Z[ab, p]                 `md4.gpu.kernels.pair_forces`

The Hermite functions of a primitive bra pair are functions of a ket in step 1. A task is a piece of a bra list with all
ket lists. First the device counts the ket pairs that count with each bra pair (`md4.gpu.kernels.select_kets`). Then

- `md4.gpu.kernels.reverse_lanes` does steps 1 and 2 for lists of these, of the smallest classes;
- `md4.gpu.kernels.reverse_fused` does so on tensor cores, for small and middle classes;
- for large classes step 1 is that of integrals, with U in memory, and step 2 is `md4.gpu.kernels.reverse_sums`. These
  take rectangles: with each bra pair all ket pairs up to the last one that counts, whose bounds fall.

J alone needs neither Gamma nor U (`DeviceForces.run_coulomb`).
"""

from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import combinations_with_replacement, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.buffers import Buffer, words
from md4.gpu.dealing import Dealer
from md4.gpu.h_layout import BRA_TURNED, KET_ELEMENTS
from md4.gpu.hermite_coulomb import DeviceCoulomb, first_aos
from md4.gpu.hermite_rows import row_width
from md4.gpu.kernels.gamma_blocks import gamma_numbers, gamma_size, launch_gamma, launch_gamma_of_table
from md4.gpu.kernels.pair_forces import launch_forces
from md4.gpu.kernels.recurrence import launch_listed_r, launch_r
from md4.gpu.kernels.reverse_fused import fused_reverse, launch_reverse_fused
from md4.gpu.kernels.reverse_lanes import lane_plan, launch_reverse_lanes
from md4.gpu.kernels.reverse_sums import launch_reverse, reverse_tile
from md4.gpu.kernels.select_kets import OTHER_BYTES, ROW_BYTES, WARPS, count_sizes, launch_select, packed_shells
from md4.gpu.kernels.two_products import BEHIND, bra_form
from md4.gpu.paths import bra_launcher
from md4.gpu.r_layout import r_stride_of
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import CHUNK_BYTES, FEWEST_BLOCKS, REVERSE
from md4.method.angular import nherm
from md4.plan import QuartetRule, groups_within, own_ranges
from md4.shells.shell_pairs import list_facts
from md4.support.display import size_text

# Forms in which there may be H of a ket list at the same time.
H_FORMS = 3
# Shares of the memory that may be used: of H of the ket lists, and of Z of a task.
H_SHARE, Z_SHARE = 0.4, 0.2
# Most bytes of Z of a task; that of one bra pair may be larger.
Z_BYTES = 1 << 30
# Most bytes of the numbers of ket pairs that tasks count together.
COUNT_BYTES = 1 << 26
# Primitive quartets, or elements of Gamma, of a bra pair with a ket list, at most: their numbers are int32, and blocks
# of threads count beyond the last one by less than 1024.
MOST_NUMBERS = (1 << 31) - 1024
# Primitive quartets with bounds below this part of the tolerance are left out of the shell quartets that count.
PRIMITIVE_PART = 0.1
# By how much a bound may be above the tolerance and yet below it by rounding.
ROUNDING = 1e-12
# Predicted seconds of a floating-point operation, and of what a task and two lists take besides.
OPERATION, TASK, TWO_LISTS = 1 / 20e12, 1e-4, 5e-5
# A list whose part of all work is smaller than 1 / (so many times the number of devices) belongs to one of them.
WHOLE_LISTS = 8
# Tracks (`md4.gpu.tracks`) that make derivatives, where all of them count. Bytes that must be free beside H for each of
# these but the first, or four times what a shell pair takes.
TRACKS, TRACK_ROOM = 3, 8 << 30


@cache
def hermite_facts(l, first=0):
    """`ListFacts` of the Hermite functions up to degree l of primitive pairs, each of which is a pair of its own.

    Those before `first` are left out.
    """
    facts = list_facts(l, 0, False, 1, 1, nherm(l), 1, 1, False)
    return replace(facts, first=first, nherm=nherm(l) - first)


@cache
def hermite_of(facts):
    """`hermite_facts` of the derivatives of the pairs of a list, of one degree more.

    Single shells that have Hermite functions of one degree only have derivatives of one degree only.
    """
    one_degree = facts.single and facts.first == nherm(facts.l - 1)
    return hermite_facts(facts.l + 1, nherm(facts.l) if one_degree else 0)


def hermite_side(ab):
    """The primitive pairs of a slice of a prepared list as a ket of `hermite_of`."""
    side = copy(ab)
    side.facts = hermite_of(ab.facts)
    return side


class Task(NamedTuple):
    """Bra pairs from `first` to `last` of a list, whose number it has, and their predicted seconds."""

    seconds: float
    number: int
    first: int
    last: int


class Terms(NamedTuple):
    """What Gamma and its bounds are made of, in device memory.

    Attributes
    ----------
    densities, norms : tuple
        Fields of `md4.gpu.kernels.reverse_sums.Densities` and `md4.gpu.kernels.select_kets.Norms`.
    of_pairs : tuple of Buffer
        Of each list, `md4.gpu.kernels.select_kets.BoundedPairs.norms`.
    by_table : bool
        Whether Gamma is in a table; see `md4.gpu.fitting_forces.TableTerms`.
    """

    densities: tuple
    norms: tuple
    of_pairs: tuple

    by_table = False

    def gamma_of(self, bra, ket):
        """What Gamma of two lists, given by their numbers, is made of."""
        return self.densities

    def norms_of(self, bra, ket):
        """What its bounds are made of."""
        return self.norms


class Counts(NamedTuple):
    """How many of each ket list count with the bra pairs of a task.

    Attributes
    ----------
    pairs : ndarray, shape (nlist, npair, 2)
        For each bra pair, how many ket pairs, and the end of the last one.
    prims : ndarray, shape (nlist, nprim)
        For each primitive bra pair, how many primitive ket pairs.
    of_warps : list of Buffer
        Of each list; see `md4.gpu.kernels.select_kets.KetCounts`.
    """

    pairs: np.ndarray
    prims: np.ndarray
    of_warps: list


def operations(bra, ket, prims):
    """Of steps 1 and 2, for a primitive pair of a bra list with `prims` of a ket list, without screening."""
    ket, hermite = ket.pairs, hermite_of(bra.prepared.facts)
    products = prims * (ket.nherm * ket.nab + 20 * nherm(ket.l + hermite.l)) + bra.pairs.nab * ket.nab * len(ket)
    return 2 * hermite.nherm * products


class Way(NamedTuple):
    """How steps 1 and 2 are done for pairs of a bra list and a ket list.

    Attributes
    ----------
    lanes, fused : md4.gpu.kernels.reverse_lanes.LanePlan, md4.gpu.kernels.reverse_fused.FusedReverse
        The plan of the kernel that takes lists of what counts, and None; both are None where rectangles are taken.
    gamma, r : int
        Numbers of Gamma of a shell quartet, and of r of a primitive quartet.
    """

    lanes: Any
    fused: Any
    gamma: int
    r: int

    @classmethod
    def of(cls, context, bra, ket):
        """On a device, for `ListFacts` of both lists."""
        hermite = hermite_of(bra)
        lanes = lane_plan(bra, ket, hermite)
        fused = None if lanes else fused_reverse(context.unit, bra, ket, hermite, context.block_shared)
        return cls(lanes, fused, gamma_size(bra, ket, lanes is not None), r_stride_of(ket, hermite))

    @property
    def listed(self):
        """Whether quartets are listed."""
        return self.lanes is not None or self.fused is not None

    def nbytes(self, shells, quartets):
        """Bytes of Gamma, lists and r of so many shell quartets and primitive quartets, or of several such numbers."""
        return (8 * self.gamma + 8) * shells + (8 if self.lanes else 12 + 8 * self.r) * quartets


class Listed(NamedTuple):
    """The quartets of some bra pairs that count with a ket list.

    Attributes
    ----------
    shells, quartets, most : int
        Shell quartets, primitive quartets, and the most of these that one primitive bra pair has.
    first, first_quartets, of_warps : Buffer
        Of `md4.gpu.kernels.select_kets.QuartetTable` and `KetCounts`.
    """

    shells: int
    quartets: int
    most: int
    first: Buffer
    first_quartets: Buffer
    of_warps: Buffer

    def slices(self, ab, way, shells, quartets, budget):
        """Yields (bra pairs, `Listed`) of slices that take at most `budget` bytes, or what a single pair takes.

        Parameters
        ----------
        ab : md4.engine.PreparedPairs
            All bra pairs.
        way : Way
        shells, quartets : ndarray
            The number of the first shell quartet of each of these pairs, and of the first primitive quartet of each
            primitive pair, and how many there are.
        """
        if way.nbytes(self.shells, self.quartets) <= budget:
            if self.quartets:
                yield ab, self
            return
        prims, begin = ab.whole.pairs.start[ab.first : ab.first + len(ab) + 1] - ab.first_prim, 0
        ends = way.nbytes(shells, quartets[prims])
        budget = max(budget, int(np.diff(ends).max()))
        while begin < len(ab):
            end = int(np.searchsorted(ends, ends[begin] + budget, side="right")) - 1
            (one, other), (first, last) = shells[[begin, end]].tolist(), prims[[begin, end]].tolist()
            counts = np.diff(quartets[first : last + 1])
            count = int(counts.sum())
            if count:
                yield ab[begin:end], Listed(
                    other - one, count, int(counts.max()), self.first.part(2 * begin, (end - begin + 1, 2)),
                    self.first_quartets.part(first, (last - first + 1,)),
                    self.of_warps.part(WARPS * (begin + first), (WARPS * (end - begin + last - first),)),
                )  # fmt: skip
            begin = end


class TaskSums:
    """Z of the bra pairs of a task, in as many parts as are used.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
    ab : md4.engine.PreparedPairs
        The bra pairs.
    rows : int
        `ReverseSums.rows`.
    most : int
        Parts for which there is room.

    Attributes
    ----------
    hermite : ListFacts
        The Hermite functions of the bra.
    used : int
        Parts that are used.
    """

    def __init__(self, context, ab, rows, most):
        self.context, self.used, self.hermite = context, 0, hermite_of(ab.facts)
        self.of_task = ab.first_prim, ab.nprim, rows
        self.size = ab.nprim * 8 * blocks_of_8(self.hermite.nherm) * rows
        self.z = context.pool.room("z", max(1, most * self.size))

    def fields(self, parts):
        """Fields of `md4.gpu.kernels.reverse_sums.ReverseSums`, so many parts of which may be added to."""
        if parts > self.used:
            self.context.clear(self.z.part(self.used * self.size, ((parts - self.used) * self.size,)))
            self.used = parts
        return self.z, *self.of_task

    @staticmethod
    def divided(most, quartets, pieces):
        """(parts, quartets of each of them) of primitive bra pairs with up to `most` of all `quartets`.

        `pieces`: (the fewest quartets of a part, parts of all of them that fill the device).
        """
        fewest, wanted = pieces
        each = max(fewest, -(-quartets // wanted), -(-most // REVERSE.most_parts))
        return -(-most // each), each


class DeviceForces:
    """Derivatives of sums over all quartets by the centres of the shells; see `md4.cpu.forces.HostForces`.

    Parameters
    ----------
    basis : md4.Basis
    lists : list of md4.contract.screening.PairList
    bounds, of_prims : list of md4.shells.schwarz.GradientBounds
        Those of each list, and of the primitive pairs of each list.
    """

    def __init__(self, basis, lists, bounds, of_prims):
        self.basis, self.lists, self.bounds, self.of_prims = basis, lists, bounds, of_prims
        self.tables, self.ways, self.predicted, self.divided, self.least = {}, {}, {}, {}, {}

    def run(self, backend, densities, coulomb, exchange, tolerance, part=0, parts=1, report=None):
        """As `md4.cpu.forces.HostForces.run`."""
        context, nao, found = backend.context, densities.shape[-1], np.zeros((self.basis.nshell, 3))
        if len(densities) == 0:  # all factors or all densities are zero
            return found, 0, np.zeros(2)
        if not exchange.any():
            return self.run_coulomb(backend, densities, coulomb, tolerance, part, parts, report)
        self.check_memory(backend, densities)
        norms = self.norms(densities)
        of_pairs = [norms[:, this.pairs.pairs[:, 0], this.pairs.pairs[:, 1]] for this in self.lists]
        d = context.pool.get(densities.size)
        context.copy_in(d.pointer, np.ascontiguousarray(densities))
        buffer, arrays = context.pool.upload([norms, coulomb, exchange, *of_pairs], context.stream)
        norms, j, k, *of_pairs = (array.part(0, (array.size,)) for array in arrays)
        terms = Terms((d, j, k, nao), (norms, j, k, self.basis.nshell, tolerance), tuple(of_pairs))
        every = range(len(self.lists))
        quartets, left_out = self.add(backend, every, every, terms, found, part, parts, report)
        for this in (d, buffer):
            context.pool.release(this)
        return found, quartets, left_out

    def add(self, backend, bras, kets, terms, found, part, parts, report=None):
        """Adds the derivatives of lists `bras` with lists `kets` to those of the shells.

        Returns
        -------
        quartets : int
        left_out : ndarray, shape (2,)
        """
        context, quartets, left_out, tracks = backend.context, 0, np.zeros(2), backend.tracks()
        room = max(TRACK_ROOM, 4 * self.least[tuple(bras), tuple(kets)])
        few = tracks[: 1 + min(TRACKS - 1, int((1 - H_SHARE) * context.pool.left()) // room)]
        for batch in self.batches(backend, kets):
            made, before = [], 0.0
            for tasks in self.counted_together(self.tasks(backend, bras, batch, part, parts), len(batch)):
                every, without = self.count(tracks, tasks, batch, terms)
                left_out += without
                # now the device has done all that it was given before
                if report is not None and before:
                    report(before)
                before = sum(task.seconds for task in tasks)
                outs = self.outs(context, tasks)
                with self.dealt(few, tasks) as dealt:
                    for (here, task), counts, out in zip(dealt, every, outs):
                        quartets += self.launch(here, task, batch, counts, terms, context.pool.share, out)
                made += zip(tasks, outs)
            for task, out in made:
                self.take(context, found, task, out)
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
        """Room for the derivatives of each task, (nprim, 6)."""
        starts = [(self.lists[task.number].pairs.start, task) for task in tasks]
        counts = [int(start[task.last] - start[task.first]) for start, task in starts]
        return [context.pool.get(max(1, 6 * count)) for count in counts]

    def run_coulomb(self, backend, densities, coulomb, tolerance, part, parts, report):
        """`run` without exchange: Z[ab, p] = j f_ab D_ab J_p, J_p = sum_cd f_cd D_cd [p|cd), |p| <= l_ab + 1.

        J alone makes J_p of all pairs (`md4.gpu.hermite_coulomb`), as if the degree of each were higher by one.
        """
        context, lists = backend.context, [this.prepared for this in self.lists]
        found, quartets, left_out = np.zeros((self.basis.nshell, 3)), 0, np.zeros(2)
        self.check_memory_for_coulomb(backend)
        for density, factor in zip(densities, coulomb.tolist()):
            rule, count, without = self.coulomb_rule(density, factor, 0.0 if context.dry else tolerance)
            if part == 0:
                quartets, left_out = quartets + count, left_out + without
            target = DeviceCoulomb(backend, self.basis, 2 * density[None], rule, lists, more=1)
            target.load(self.with_room_for_h(backend, lists))
            for l_ket, l_bra in combinations_with_replacement(sorted(target.degrees), 2):
                target.add(l_bra, l_ket, part, parts)
            for task in self.tasks(backend, range(len(lists)), []):
                whole = lists[task.number]
                this = whole[task.first : task.last]
                out, sums = context.pool.get(max(1, 6 * this.nprim)), TaskSums(context, this, self.rows_of(this), 1)
                target.add_products(whole, this, factor, sums.fields(1))
                launch_forces(context, this, sums.hermite, sums.fields(1), 1, out)
                self.take(context, found, task, out)
            target.forget()
            context.pool.release(target.buffer)
        if report is not None:
            report(self.seconds() / parts)
        return found, quartets, left_out

    def coulomb_rule(self, density, factor, tolerance):
        """(`md4.plan.QuartetRule`, quartets that count, as `run` counts them, bounds of the others).

        Without exchange the bound of a quartet is a product of two numbers of its pairs.
        """
        shells = np.concatenate([this.pairs.pairs for this in self.lists])
        norms = self.norms(density[None])[0] * np.sqrt(abs(factor))
        of_pairs = norms[shells[:, 0], shells[:, 1]]
        own, derivative = (
            of_pairs * np.concatenate([getattr(bounds, name) for bounds in self.bounds])
            for name in ("own", "derivative")
        )  # fmt: skip
        order = np.sort(own)
        with np.errstate(divide="ignore", invalid="ignore"):
            limits = np.where(derivative > 0, tolerance * (1 + ROUNDING) / derivative, np.inf)
            ratios = np.where(derivative > 0, own / derivative, 0.0)
        left = np.searchsorted(order, limits) if tolerance > 0 else np.zeros(len(own), dtype=np.int64)
        sums = (np.append(0, np.cumsum(order**n))[left] @ derivative**n for n in (1, 2))
        rule = QuartetRule(tolerance, shells, derivative, derivative, ratios, norms, np.zeros(0, dtype=np.int32))
        return rule, len(own) ** 2 - int(left.sum()), np.array([*sums])

    @staticmethod
    def with_room_for_h(backend, lists):
        """The lists, one after the other; H of those before is dropped where that of the next would not fit."""
        for n, this in enumerate(lists):
            if backend.hermite_bytes(this.pairs) > H_SHARE * backend.memory_left():
                for done in lists[:n]:
                    done.drop()
            yield this

    def norms(self, densities):
        """|D_ab| of blocks, shape (n, nshell, nshell)."""
        first = self.basis.ao_loc[:-1]
        return np.sqrt(np.add.reduceat(np.add.reduceat(densities**2, first, axis=2), first, axis=1))

    def bounded(self, context, number, of_bra, terms):
        """Fields of `md4.gpu.kernels.select_kets.BoundedPairs` of a list; bounds are kept in device memory."""
        if number not in self.tables:
            bounds, of_prims = self.bounds[number], self.of_prims[number]
            arrays = [bounds.derivative, of_prims.derivative, bounds.own, of_prims.own]
            arrays = [packed_shells(self.lists[number].pairs.pairs), *arrays]
            with context.alone():
                self.tables[number] = context.pool.upload(arrays, context.stream)[1]
        shells, *both = self.tables[number]
        of_side = both[:2] if of_bra else both[2:]
        return shells, self.lists[number].prepared.data.start, *of_side, terms.of_pairs[number]

    def counts_of(self, task):
        """Numbers of both counts of a task with a list; see `md4.gpu.kernels.select_kets.KetCounts`."""
        start = self.lists[task.number].pairs.start
        return count_sizes(task.last - task.first, int(start[task.last] - start[task.first]))

    def counted_together(self, tasks, nlist):
        """Successive tasks, whose counts take at most `COUNT_BYTES`; a large task is alone."""
        needs = [4 * nlist * sum(self.counts_of(task)) for task in tasks]
        return [tasks[group.start : group.stop] for group in groups_within(needs, COUNT_BYTES)]

    def count(self, backends, tasks, batch, terms):
        """What counts of each list of a batch with the bra pairs of tasks, which are dealt to tracks.

        Returns
        -------
        counts : list of Counts
            Of each task.
        left_out : ndarray, shape (2,)
            As of `run`.
        """
        context, nlist = backends[0].context, len(batch)
        sizes = nlist * np.array([self.counts_of(task) for task in tasks])
        edges, of_warps = (np.cumsum([0, *these]).tolist() for these in sizes.T)
        numbers, most = np.zeros(edges[-1], dtype=np.int32), 2 * max(task.last for task in tasks)
        left_out = np.zeros((len(backends), most))
        sums = context.pool.room("left out", left_out.size)
        room = context.pool.room("ket counts", words(4 * (edges[-1] + of_warps[-1])))
        context.clear(sums)
        counts = []
        with self.dealt(backends, tasks) as dealt:
            for (backend, task), first, end, of_them in zip(dealt, edges, edges[1:], of_warps):
                here, npair, parts = backend.context, task.last - task.first, []
                bra, own = self.bounded(here, task.number, True, terms), sums.part(most * here.track, (most,))
                facts, (size, of_warp) = self.lists[task.number].prepared.facts, self.counts_of(task)
                for n, number in enumerate(batch):
                    ket, norms = self.bounded(here, number, False, terms), terms.norms_of(task.number, number)
                    places = (first + n * size, size), (edges[-1] + of_them + n * of_warp, of_warp)
                    one, part = (Buffer(room.pointer + 4 * at, (count,), 4, room.owner) for at, count in places)
                    limit = PRIMITIVE_PART * norms[-1] if self.way(here, task.number, number).listed else 0.0
                    launch_select(
                        here, npair, facts.max_prim, bra, task.first, ket, len(self.lists[number]), norms, limit,
                        (one, part, own), by_table=terms.by_table,
                    )  # fmt: skip
                    parts.append(part)
                of_task = numbers[first:end].reshape(nlist, -1)
                of_pairs = of_task[:, : 2 * npair].reshape(nlist, npair, 2)
                counts.append(Counts(of_pairs, of_task[:, 2 * npair :], parts))
        context.copy_out(numbers, room.pointer)
        context.copy_out(left_out, sums.pointer)
        if context.dry:  # as if all of them counted
            for pairs, prims, _ in counts:
                for n, number in enumerate(batch):
                    pairs[n], prims[n] = len(self.lists[number]), self.lists[number].pairs.nprim
        return counts, left_out.reshape(-1, 2).sum(axis=0)

    def way(self, context, bra, ket):
        """`Way` of two lists, given by their numbers."""
        if (bra, ket) not in self.ways:
            self.ways[bra, ket] = Way.of(context, *(self.lists[number].prepared.facts for number in (bra, ket)))
        return self.ways[bra, ket]

    def launch(self, backend, task, batch, counts, terms, share, out):
        """Has a track make the derivatives of a task, (nprim, 6) into `out`; how many quartets are made.

        `share`: `md4.gpu.pool.Pool.share` of the engine, which is asked for each list, since Z and H are there by then.
        """
        context, this, made = backend.context, self.lists[task.number].prepared[task.first : task.last], 0
        sums = TaskSums(context, this, self.rows_of(this), REVERSE.most_parts)
        shells, width = 2 * len(this) + 2, 2 * len(this) + this.nprim + 3
        numbers = np.zeros((len(batch), width), dtype=np.int64)
        pairs, quartets = numbers[:, :shells].reshape(len(batch), -1, 2), numbers[:, shells:]
        np.cumsum(counts.pairs[:, :, 0], axis=1, out=pairs[:, 1:, 0])
        np.cumsum(counts.prims, axis=1, out=quartets[:, 1:])
        pairs[:, :-1, 1] = counts.pairs[:, :, 1]
        on_device = context.pool.room("first quartets", numbers.size)
        context.copy_in_pieces(on_device.pointer, numbers)
        totals = zip(*(some.tolist() for some in (pairs[:, -1, 0], quartets[:, -1], counts.prims.max(1, initial=0))))
        for n, (number, of_list) in enumerate(zip(batch, totals)):
            way, budget = self.way(context, task.number, number), share(CHUNK_BYTES)
            if way.listed:
                first = on_device.part(width * n, (len(this) + 1, 2))
                first_quartets = on_device.part(width * n + shells, (this.nprim + 1,))
                listed = Listed(*of_list, first, first_quartets, counts.of_warps[n])
                for ab, these in listed.slices(this, way, pairs[n, :, 0], quartets[n], budget):
                    self.add_lists(backend, task.number, ab, number, way, these, terms, sums)
                made += listed.shells
            else:
                made += self.add_rectangles(backend, task, this, number, counts.pairs[n, :, 1], terms, sums, budget)
        launch_forces(context, this, sums.hermite, sums.fields(1), sums.used, out)
        return made

    def add_lists(self, backend, bra, ab, ket, way, listed, terms, sums):
        """Adds to Z what ket pairs give bra pairs `ab` with which they are `listed`; both lists by their numbers."""
        context, cd, in_lanes, hermite = backend.context, self.lists[ket].prepared, way.lanes is not None, sums.hermite
        gamma = context.pool.room("gamma", gamma_numbers(listed.shells, way.gamma, in_lanes))
        pieces, norms = REVERSE.lane_pieces if in_lanes else REVERSE.fused_pieces, terms.norms_of(bra, ket)
        parts, each = sums.divided(listed.most, listed.quartets, pieces)
        z, table = sums.fields(parts), self.table(context, listed, not in_lanes)
        launch_select(
            context, len(ab), ab.facts.max_prim, self.bounded(context, bra, True, terms), ab.first,
            self.bounded(context, ket, False, terms), len(cd), norms, PRIMITIVE_PART * norms[-1],
            (table[2], listed.of_warps, z[0]), table, terms.by_table,
        )  # fmt: skip
        of_gamma = terms.gamma_of(bra, ket)
        if terms.by_table:
            launch_gamma_of_table(context, in_lanes, table[2:4], ab, cd, of_gamma, gamma)
        else:
            aos = first_aos(context, ab, self.basis), first_aos(context, cd, self.basis)
            launch_gamma(context, in_lanes, table[2:4], aos, ab, cd, of_gamma, gamma)
        if in_lanes:
            h, slots = cd.h(KET_ELEMENTS).array, backend.pair_maker.slots(cd.pairs, cd.data)
            launch_reverse_lanes(
                context, backend.operator, way.lanes, ab, cd, h, slots, gamma, hermite, table, z, parts, each
            )  # fmt: skip
        else:
            h, r = cd.h(BRA_TURNED).array, context.pool.room("r", listed.quartets * way.r)
            of_prims, count = (table[5], table[4]), listed.quartets
            launch_listed_r(context, backend.operator, cd, hermite_side(ab), of_prims, count, r)
            launch_reverse_fused(context, way.fused, ab, cd, h, gamma, hermite, r, table, z, parts, each)

    @staticmethod
    def table(context, listed, bra_prims):
        """Fields of `md4.gpu.kernels.select_kets.QuartetTable`, which is to be written, with `bra_prims` or without."""
        shells, quartets = listed.shells, listed.quartets
        counts = shells, shells, quartets if bra_prims else 0, quartets, quartets
        room = context.pool.room("quartets", sum(words(4 * count) for count in counts))
        fields, place = [listed.first, listed.first_quartets], room.pointer
        for count in counts:
            fields.append(Buffer(place, (count,), 4, room.owner))
            place += 8 * words(4 * count)
        return tuple(fields)

    def add_rectangles(self, backend, task, this, number, counts, terms, sums, budget):
        """Adds to Z what all ket pairs of a list give up to the last one that counts; how many quartets these are."""
        context, ket, limits = backend.context, self.lists[number].prepared, np.zeros(task.last, dtype=np.int32)
        limits[task.first :] = counts
        on_device = self.sent(context, limits)
        aos = first_aos(context, this, self.basis), first_aos(context, ket, self.basis)
        tile, row_blocks = reverse_tile(this.facts.nab, self.columns(this))
        np8, parts, gamma = blocks_of_8(sums.hermite.nherm), self.parts_of(this), terms.gamma_of(task.number, number)
        for ab, cd in self.chunks(this, ket, counts, budget):
            u, z = self.half_transformed(backend, ab, cd, on_device), sums.fields(parts)
            launch_reverse(context, tile, row_blocks, aos, ab, cd, u, np8, on_device, gamma, z, parts, terms.by_table)
        return int(counts.sum(dtype=np.int64))

    def half_transformed(self, backend, ab, cd, limits):
        """Step 1: U of a chunk, as (cd|p]."""
        context, side = backend.context, hermite_side(ab)
        r = context.pool.room("r", max(1, cd.nprim * side.nprim * r_stride_of(cd.facts, side.facts)))
        launch_r(context, backend.operator, cd, side, r, (limits, True))
        size = side.nprim * blocks_of_8(side.facts.nherm) * cd.npair * cd.facts.nab * 8
        u = context.pool.room("abq", size + BEHIND)
        launch = context.fixed(bra_launcher, cd.facts, side.facts)
        launch(context, cd.h(bra_form(context.unit, cd.facts)).array, cd, side, r, u, (limits, True))
        return u

    def take(self, context, found, task, out):
        """Adds the derivatives of a task to those of the shells."""
        pairs, values = self.lists[task.number].pairs, np.empty((out.size // 6, 6))
        context.copy_out(values, out.pointer)
        context.pool.release(out)
        counts = np.diff(pairs.start[task.first : task.last + 1])
        for side, shells in enumerate(pairs.pairs[task.first : task.last].T):
            owner = np.repeat(shells, counts)
            for axis in range(3):
                found[:, axis] += np.bincount(owner, values[: len(owner), 3 * side + axis], len(found))

    @staticmethod
    def sent(context, counts):
        """An int32 array in device memory, until the next one."""
        room = context.pool.room("ket limits", max(1, words(counts.nbytes)))
        context.copy_in_pieces(room.pointer, counts)
        return Buffer(room.pointer, (counts.size,), 4, room)

    # sizes

    @staticmethod
    def columns(ab):
        """About how many blocks of 8 columns Z of a bra pair has."""
        return max(1, round(ab.nprim / max(1, ab.npair))) * blocks_of_8(hermite_of(ab.facts).nherm)

    def rows_of(self, ab):
        """Rows of Z of the pairs of a list, filled up to whole tiles."""
        tile, row_blocks = reverse_tile(ab.facts.nab, self.columns(ab))
        return 8 * tile.rows8 * row_blocks

    def parts_of(self, ab):
        """Among how many blocks of threads the ket pairs of a chunk are divided, to fill the device."""
        tile, row_blocks = reverse_tile(ab.facts.nab, self.columns(ab))
        blocks = ab.npair * row_blocks * -(-self.columns(ab) // (tile.nt * tile.warps))
        return min(REVERSE.most_parts, -(-FEWEST_BLOCKS // max(1, blocks)))

    def chunks(self, bra, ket, counts, budget):
        """Slices (ab, cd) of a rectangle whose r and U take about `budget` bytes, without ket pairs that never count.

        `counts` says with how many ket pairs each bra pair counts.
        """
        hermite = hermite_of(bra.facts)
        np8, stride = blocks_of_8(hermite.nherm), r_stride_of(ket.facts, hermite)
        budget, of_ket = max(1, budget // 8), ket.pairs.start
        start = bra.whole.pairs.start[bra.first : bra.first + bra.npair + 1]
        most = int(counts.max(initial=0))

        def numbers(first, last):
            """Numbers of r and U of each primitive bra pair with the ket pairs from `first` to `last`."""
            return int(of_ket[last] - of_ket[first]) * stride + (last - first) * ket.facts.nab * 8 * np8

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

    def batches(self, backend, kets):
        """Those of the lists `kets` whose H matrices fit the memory at the same time, a batch after the other."""
        needs = [self.h_bytes(backend, self.lists[number]) for number in kets]
        for group in groups_within(needs, H_SHARE * backend.memory_left()):
            yield [kets[n] for n in group]
            for n in group if group.stop < len(needs) else ():
                self.lists[kets[n]].prepared.drop()

    @staticmethod
    def h_bytes(backend, this):
        """Bytes of the H matrices of a ket list, in all forms that kernels take."""
        return H_FORMS * backend.hermite_bytes(this.pairs)

    def own_pairs(self, number, part, parts):
        """Ranges of the pairs of a list that belong to a part."""
        count, owner = len(self.lists[number]), self.owners(parts)[number]
        if owner is None:
            return own_ranges(count, (part + number) % parts, parts)
        return [slice(0, count)] if owner == part else []

    def owners(self, parts):
        """The part to which each list belongs, or None where it is divided among all.

        Each range is a task, which takes the host as long as that of a whole list, so only lists of much work are
        divided. It depends on nothing else than the basis and the lists, which are the same in all processes.
        """
        if parts not in self.divided:
            prims = [int(self.basis.nprims[this.pairs.pairs].prod(axis=1).sum()) for this in self.lists]
            costs = [
                count * sum(map(partial(operations, this), self.lists, prims)) for this, count in zip(self.lists, prims)
            ]  # fmt: skip
            loads, owners = [0.0] * parts, [None] * len(costs)
            for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
                if costs[number] * parts * WHOLE_LISTS < sum(costs):
                    owners[number] = loads.index(min(loads))
                    loads[owners[number]] += costs[number]
            self.divided[parts] = owners
        return self.divided[parts]

    def tasks(self, backend, bras, batch, part=0, parts=1):
        """Every `Task` of a part, with pairs of lists `bras`, those of most work first.

        Which pairs belong to a part does not depend on memory, which may differ between processes.
        """
        room, found = min(Z_BYTES, Z_SHARE * backend.memory_left()), []
        for number in bras:
            this = self.lists[number].prepared
            per_prim = 64 * blocks_of_8(hermite_of(this.facts).nherm) * self.rows_of(this) * REVERSE.most_parts
            start, seconds = this.pairs.start, self.seconds_of(number, batch) / max(1, len(this))
            for own in self.own_pairs(number, part, parts):
                edges = [own.start]
                while edges[-1] < own.stop:
                    end = start[edges[-1]] + max(1, room // per_prim)
                    end = int(np.searchsorted(start, end, side="right")) - 1
                    edges.append(min(max(end, edges[-1] + 1), own.stop))
                found += [Task((last - first) * seconds, number, first, last) for first, last in pairwise(edges)]
        return sorted(found, reverse=True)

    def seconds_of(self, number, batch):
        """Predicted seconds of a bra list with some ket lists, without screening."""
        key = number, tuple(batch)
        if key not in self.predicted:
            bra, kets = self.lists[number], [self.lists[n] for n in batch]
            count = bra.pairs.nprim * sum(operations(bra, ket, ket.pairs.nprim) for ket in kets)
            self.predicted[key] = TASK + TWO_LISTS * len(kets) + OPERATION * count
        return self.predicted[key]

    def seconds(self):
        """Predicted seconds, without screening."""
        every = range(len(self.lists))
        return sum(self.seconds_of(number, every) for number in every)

    def check_memory(self, backend, densities):
        """MemoryLimitError, before anything is allocated, if there is no room for one shell pair with any list."""
        tables = 2 * densities.nbytes + (40 + 8 * len(densities)) * sum(map(len, self.lists))
        tables += 16 * sum(this.pairs.nprim for this in self.lists)
        every = range(len(self.lists))
        self.check_lists(backend, every, every, {"densities and bounds": tables})

    def check_lists(self, backend, bras, kets, beside):
        """As `check_memory` for lists `bras` with lists `kets`, and what is needed `beside`, as for `require`."""
        key, context = (tuple(bras), tuple(kets)), backend.context
        bras, kets = ([self.lists[number].prepared for number in numbers] for numbers in key)
        most = max(this.pairs.max_prim for this in bras) * max(this.nprim for this in kets)
        most = max(most, max(this.facts.nab for this in bras) * max(this.facts.nab * len(this) for this in kets))
        if most > MOST_NUMBERS:
            raise MemoryLimitError(
                f"a shell pair of {self.basis!r} may have {most} primitive quartets, or elements of Gamma, with a list "
                f"of shell pairs, but gradients on a GPU take {MOST_NUMBERS} at once; use backend='cpu'."
            )
        longest, room = max(this.pairs.max_prim for this in bras), context.block_shared - ROW_BYTES
        most = (room - OTHER_BYTES) // (4 * WARPS) - 1
        if longest > most:
            raise MemoryLimitError(
                f"a shell pair of {self.basis!r} may have {longest} primitive pairs, but gradients on this GPU take "
                f"{most}; use backend='cpu'."
            )
        h = max(H_FORMS * backend.hermite_bytes(this.pairs) for this in kets)
        if key not in self.least:
            self.least[key] = max(self.least_bytes(context, bra, ket) for bra in bras for ket in kets)
        self.require(backend, beside | {"the H matrices of one list": h, "a shell pair": self.least[key]})

    def check_memory_for_coulomb(self, backend):
        """As `check_memory`, of J alone."""
        matrices, sums, h, z = 16 * self.basis.nao**2, 0, 0, 0
        for this in self.lists:
            pairs, hermite = this.pairs, hermite_of(this.prepared.facts).nherm
            sums += pairs.nprim * (16 * row_width(pairs.l + 1, True) + 60) + 32 * len(pairs)
            h = max(h, backend.hermite_bytes(pairs))
            z = max(z, 64 * this.prepared.facts.max_prim * blocks_of_8(hermite) * self.rows_of(this.prepared))
        z *= REVERSE.most_parts
        of = {"densities": matrices, "Hermite functions": sums, "the H matrices of one list": h, "a shell pair": z}
        self.require(backend, of)

    def require(self, backend, sizes):
        """MemoryLimitError if bytes, by what they are of, do not fit when H of all lists has been given back."""
        need = sum(sizes.values())
        if need > backend.memory_left():
            for this in self.lists:  # H that builds keep, too
                this.prepared.drop()
        if need > backend.memory_left():
            parts = ", ".join(f"{size_text(size)} of {what}" for what, size in sizes.items())
            raise MemoryLimitError(
                f"gradients of {self.basis!r} take at least {size_text(need)} ({parts}), but "
                f"{size_text(backend.memory_left())} may be used; raise max_memory."
            )

    def least_bytes(self, context, bra, ket):
        """Bytes of Z of a bra pair, and of lists, Gamma, r and U with all pairs of a ket list."""
        one, other = bra.facts, ket.facts
        hermite = hermite_of(one)
        np8, quartet = blocks_of_8(hermite.nherm), 8 * r_stride_of(other, hermite)
        z = 64 * one.max_prim * np8 * self.rows_of(bra) * REVERSE.most_parts
        way = Way.of(context, one, other)
        if way.listed:
            gamma = gamma_numbers(len(ket), way.gamma, way.lanes is not None)
            return z + 8 * (gamma - len(ket) * way.gamma) + way.nbytes(len(ket), one.max_prim * ket.nprim)
        return z + one.max_prim * (other.max_prim * quartet + 64 * np8 * other.nab)
